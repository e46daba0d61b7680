// The plain way to write a paged KV cache, as a peer to time against: one token a block, 16 bytes a load.
//
// bfloat16 keys and values [num_tokens, row] go into a cache [num_blocks, 2, block_size, row], where a row is all heads
// of one token (NHD). Slots outside the cache are skipped.

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kElements = sizeof(uint4) / sizeof(__nv_bfloat16);

struct Bfloat16 {
  using Stored = uint4;
  static __device__ Stored encode(uint4 x, float) { return x; }
};

struct Fp8E4m3 {
  using Stored = uint2;
  static __device__ Stored encode(uint4 x, float scale) {
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&x);
    Stored stored;
    auto* codes = reinterpret_cast<__nv_fp8x2_storage_t*>(&stored);
#pragma unroll
    for (int i = 0; i < kElements / 2; ++i) {
      const float2 pair = __bfloat1622float2(pairs[i]);
      codes[i] = __nv_cvt_float2_to_fp8x2(make_float2(pair.x / scale, pair.y / scale), __NV_SATFINITE, __NV_E4M3);
    }
    return stored;
  }
};

template <typename Format>
__global__ void reshape_and_cache(const uint4* __restrict__ key, const uint4* __restrict__ value,
                                  typename Format::Stored* __restrict__ cache, const int32_t* __restrict__ slot_mapping,
                                  const float* __restrict__ k_scale, const float* __restrict__ v_scale,
                                  int num_slots, int block_size, int row) {
  const int64_t token = blockIdx.x;
  const int slot = slot_mapping[token];
  if (slot < 0 || slot >= num_slots) return;
  const int64_t half = int64_t{block_size} * row;
  auto* keys = cache + slot / block_size * 2 * half + slot % block_size * row;
  const float k = *k_scale, v = *v_scale;
  for (int i = threadIdx.x; i < row; i += blockDim.x) {
    const uint4 key_elements = key[token * row + i], value_elements = value[token * row + i];
    keys[i] = Format::encode(key_elements, k);
    keys[half + i] = Format::encode(value_elements, v);
  }
}

template <typename Format>
int launch(const void* key, const void* value, void* cache, const void* slot_mapping, const void* k_scale,
           const void* v_scale, int num_tokens, int num_slots, int block_size, int row_elements, int threads) {
  reshape_and_cache<Format><<<num_tokens, threads>>>(
      static_cast<const uint4*>(key), static_cast<const uint4*>(value), static_cast<typename Format::Stored*>(cache),
      static_cast<const int32_t*>(slot_mapping), static_cast<const float*>(k_scale), static_cast<const float*>(v_scale),
      num_slots, block_size, row_elements / kElements);
  return cudaGetLastError();
}

}  // namespace

extern "C" int write_bfloat16(const void* key, const void* value, void* cache, const void* slot_mapping,
                              const void* k_scale, const void* v_scale, int num_tokens, int num_slots,
                              int block_size, int row_elements, int threads) {
  return launch<Bfloat16>(key, value, cache, slot_mapping, k_scale, v_scale, num_tokens, num_slots, block_size,
                          row_elements, threads);
}

extern "C" int write_fp8_e4m3(const void* key, const void* value, void* cache, const void* slot_mapping,
                              const void* k_scale, const void* v_scale, int num_tokens, int num_slots,
                              int block_size, int row_elements, int threads) {
  return launch<Fp8E4m3>(key, value, cache, slot_mapping, k_scale, v_scale, num_tokens, num_slots, block_size,
                         row_elements, threads);
}
