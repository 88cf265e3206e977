import gc
def test_a(): pass
async def test_b(): pass
async def test_c(): pass
def test_d(): gc.collect()
