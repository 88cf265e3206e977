import gc
def test_sync(): gc.collect()
async def test_b(): gc.collect()
def test_c(): gc.collect()
async def test_d(): gc.collect()
