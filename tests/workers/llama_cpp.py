"""llama.cpp's server for a GGUF file. Arguments: the file. It computes in float32, writes its
address to stdout, and lives until it is killed or its stdin is closed: llama.cpp's own end can wait
for ever."""

import os
import sys

import xllamacpp

p = xllamacpp.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.cpuparams.n_threads = sys.argv[1], 512, 1, 1
p.warmup, p.verbosity = False, 0
p.cache_type_k = p.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
p.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(p)
print(server.listening_address, flush=True)
sys.stdin.read()
os._exit(0)
