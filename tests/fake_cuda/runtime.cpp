// The CUDA runtime, NVML and NCCL without a GPU, for tests: LD_PRELOAD puts it before NVIDIA's libraries.
//
// Device memory is host memory. Every stream has a thread that does its operations in order, early
// (as soon as it can) or late (FAKE_CUDA=late: when somebody waits for them, or after LATE seconds;
// copies between host and device take a while even then). NCCL exchanges bytes between processes
// through files in /dev/shm. Kernels of torch are done by kernels.cpp, on the calling thread once
// what was queued before is done; others do nothing, and say so on standard error.
//
// Stricter than a GPU where a GPU is undefined: device memory begins as NaN, and a copy that leaves
// its allocation, or one registered piece of host memory, is refused.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#undef cudaStreamGetCaptureInfo
#undef cudaGetDeviceProperties

using Clock = std::chrono::steady_clock;
static constexpr auto LATE = std::chrono::milliseconds(300);
static constexpr auto TRANSFER = std::chrono::microseconds(500);
static constexpr size_t DEVICE_BYTES = 8ull << 30;

static bool late() {
  static const bool is_late = getenv("FAKE_CUDA") && !strcmp(getenv("FAKE_CUDA"), "late");
  return is_late;
}

// --- streams and events ---------------------------------------------------------------------------

struct Stream {
  struct Op {
    std::function<void()> run;
    bool transfer;
    Clock::time_point queued;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Op> waiting;
  uint64_t queued = 0, done = 0, wanted = 0;
  bool has_thread = false;

  uint64_t put(std::function<void()> run, bool transfer = false) {
    std::lock_guard<std::mutex> hold(mutex);
    if (!has_thread) {
      std::thread([this] { work(); }).detach();
      has_thread = true;
    }
    waiting.push_back({std::move(run), transfer, Clock::now()});
    changed.notify_all();
    return ++queued;
  }
  bool is_done(uint64_t position) {
    std::lock_guard<std::mutex> hold(mutex);
    return done >= position;
  }
  void wait(uint64_t position) {
    std::unique_lock<std::mutex> hold(mutex);
    if (wanted < position) {
      wanted = position;
      changed.notify_all();
    }
    changed.wait(hold, [&] { return done >= position; });
  }
  void wait() {
    uint64_t all;
    {
      std::lock_guard<std::mutex> hold(mutex);
      all = queued;
    }
    wait(all);
  }
  void work() {
    for (;;) {
      Op op;
      {
        std::unique_lock<std::mutex> hold(mutex);
        changed.wait(hold, [&] { return !waiting.empty(); });
        if (late()) {
          auto due = waiting.front().queued + LATE;
          changed.wait_until(hold, due, [&] { return wanted > done; });
        }
        op = std::move(waiting.front());
        waiting.pop_front();
      }
      if (op.transfer && late()) std::this_thread::sleep_for(TRANSFER);
      op.run();
      std::lock_guard<std::mutex> hold(mutex);
      ++done;
      changed.notify_all();
    }
  }
};

struct Event {
  Stream* stream = nullptr;
  uint64_t position = 0;
  std::shared_ptr<Clock::time_point> time;
};

// Never destroyed: threads still use them while the process ends.
static std::mutex& table = *new std::mutex;
static auto& streams = *new std::set<Stream*>;
static thread_local int device = 0;

// How often a thread of the program has waited for the device.
static auto& host_waits = *new std::atomic<int>;
static thread_local Stream* copied_from = nullptr;  // by a copy that has waited

static Stream* stream_of(cudaStream_t handle) {
  static auto& defaults = *new std::map<int, Stream*>;
  if (handle) return (Stream*)handle;
  std::lock_guard<std::mutex> hold(table);
  auto& stream = defaults[device];
  if (!stream) streams.insert(stream = new Stream);
  return stream;
}

static void wait_for_all() {
  ++host_waits;
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> hold(table);
    all.assign(streams.begin(), streams.end());
  }
  for (auto* stream : all) stream->wait();
}

// --- memory ----------------------------------------------------------------------------------------

using Ranges = std::map<char*, size_t>;
static Ranges& on_device = *new Ranges;
static Ranges& allocated_on_host = *new Ranges;
static Ranges& registered = *new Ranges;
static size_t used = 0;

// The range that holds an address, or end().
static Ranges::iterator find(Ranges& ranges, const void* address) {
  auto found = ranges.upper_bound((char*)address);
  if (found == ranges.begin()) return ranges.end();
  --found;
  return (char*)address < found->first + found->second ? found : ranges.end();
}

enum class Place { DEVICE, PINNED, PAGEABLE, WRONG };

static Place place_of(const void* start, size_t length) {
  std::lock_guard<std::mutex> hold(table);
  const char* last = (const char*)start + (length ? length - 1 : 0);
  if (find(on_device, start) != on_device.end())
    return find(on_device, last) != on_device.end() ? Place::DEVICE : Place::WRONG;
  for (auto* ranges : {&allocated_on_host, &registered}) {
    auto first = find(*ranges, start), final = find(*ranges, last);
    if (first != final) return Place::WRONG;  // "only in part registered" is an invalid value, too
    if (first != ranges->end()) return Place::PINNED;
  }
  return Place::PAGEABLE;
}

static void* new_device_memory(size_t bytes) {
  size_t whole = (bytes + 4095) / 4096 * 4096;
  void* made = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  memset(made, 0xff, whole);
  return made;
}

extern "C" {

cudaError_t cudaMalloc(void** out, size_t bytes) {
  std::lock_guard<std::mutex> hold(table);
  if (used + bytes > DEVICE_BYTES) return cudaErrorMemoryAllocation;
  used += bytes;
  *out = new_device_memory(bytes);
  on_device[(char*)*out] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* start) {
  wait_for_all();
  std::lock_guard<std::mutex> hold(table);
  auto found = on_device.find((char*)start);
  if (found == on_device.end()) return cudaSuccess;
  used -= found->second;
  munmap(start, (found->second + 4095) / 4096 * 4096);
  on_device.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> hold(table);
  *out = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  allocated_on_host[(char*)*out] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* start) {
  wait_for_all();
  std::lock_guard<std::mutex> hold(table);
  if (allocated_on_host.erase((char*)start)) free(start);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* start, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> hold(table);
  char* first = (char*)start;
  auto next = registered.lower_bound(first);
  if (find(registered, first) != registered.end() ||
      (next != registered.end() && next->first < first + bytes))
    return cudaErrorHostMemoryAlreadyRegistered;
  if (getenv("FAKE_CUDA_TRACE")) fprintf(stderr, "fake CUDA: registered %zu bytes\n", bytes);
  registered[first] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* start) {
  std::lock_guard<std::mutex> hold(table);
  return registered.erase((char*)start) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* address) {
  memset(out, 0, sizeof *out);
  Place place = place_of(address, 1);
  out->device = device;
  out->type = place == Place::DEVICE   ? cudaMemoryTypeDevice
              : place == Place::PINNED ? cudaMemoryTypeHost
                                       : cudaMemoryTypeUnregistered;
  if (place != Place::PAGEABLE) out->devicePointer = (void*)address;
  if (place == Place::PINNED) out->hostPointer = (void*)address;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> hold(table);
  *total = DEVICE_BYTES;
  *free_bytes = DEVICE_BYTES - used;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t handle) {
  Place source = place_of(from, bytes), target = place_of(to, bytes);
  if (source == Place::WRONG || target == Place::WRONG) {
    fprintf(stderr, "fake CUDA: a copy of %zu bytes crosses the end of its memory\n", bytes);
    return cudaErrorInvalidValue;
  }
  Stream* stream = stream_of(handle);
  bool transfer = source != target;
  if (source == Place::PAGEABLE) {  // the driver stages it: the caller may change it at once
    auto staged = std::make_shared<std::vector<char>>((char*)from, (char*)from + bytes);
    stream->put([=] { memcpy(to, staged->data(), bytes); }, transfer);
  } else {
    stream->put([=] { memmove(to, from, bytes); }, transfer);
  }
  if (target == Place::PAGEABLE) {
    ++host_waits;
    stream->wait();
    copied_from = stream;
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  ++host_waits;
  auto result = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  stream_of(nullptr)->wait();
  return result;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t handle) {
  stream_of(handle)->put(
      [=] {
        for (size_t row = 0; row < height; ++row)
          memcpy((char*)to + row * to_pitch, (char*)from + row * from_pitch, width);
      },
      true);
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                cudaStream_t handle) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, handle);
}
cudaError_t cudaMemsetAsync(void* start, int value, size_t bytes, cudaStream_t handle) {
  stream_of(handle)->put([=] { memset(start, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* start, int value, size_t bytes) {
  ++host_waits;
  cudaMemsetAsync(start, value, bytes, nullptr);
  stream_of(nullptr)->wait();
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** out, const void*) {
  *out = nullptr;
  return cudaSuccess;
}

// Virtual memory, for expandable segments: a handle is its size.
CUresult cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *out = 2 << 20;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr,
                             unsigned long long) {
  void* made = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *out = (CUdeviceptr)made;
  return made == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
  munmap((void*)start, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t bytes, const CUmemAllocationProp*,
                     unsigned long long) {
  std::lock_guard<std::mutex> hold(table);
  if (used + bytes > DEVICE_BYTES) return CUDA_ERROR_OUT_OF_MEMORY;
  used += bytes;
  *out = bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle bytes) {
  std::lock_guard<std::mutex> hold(table);
  used -= bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t, CUmemGenericAllocationHandle,
                  unsigned long long) {
  std::lock_guard<std::mutex> hold(table);
  mprotect((void*)start, bytes, PROT_READ | PROT_WRITE);
  memset((void*)start, 0xff, bytes);
  on_device[(char*)start] = bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
  wait_for_all();
  std::lock_guard<std::mutex> hold(table);
  on_device.erase((char*)start);
  mmap((void*)start, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}

// --- streams and events, as the API has them ------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int) {
  auto* stream = new Stream;
  std::lock_guard<std::mutex> hold(table);
  streams.insert(stream);
  *out = (cudaStream_t)stream;
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned) {
  return cudaStreamCreateWithPriority(out, 0, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* out) {
  *out = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  if (copied_from != stream) ++host_waits;  // else torch waits once more for the copy
  copied_from = nullptr;
  stream->wait();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  std::lock_guard<std::mutex> hold(stream->mutex);
  return stream->done == stream->queued ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaDeviceSynchronize() {
  wait_for_all();
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  *out = (cudaEvent_t) new Event;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete (Event*)handle;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
  auto* event = (Event*)handle;
  auto time = std::make_shared<Clock::time_point>();
  Stream* stream = stream_of(on);
  uint64_t position = stream->put([time] { *time = Clock::now(); });
  *event = {stream, position, time};
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  ++host_waits;
  Event event = *(Event*)handle;
  if (event.stream) event.stream->wait(event.position);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Event event = *(Event*)handle;
  return !event.stream || event.stream->is_done(event.position) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t start, cudaEvent_t stop) {
  if (cudaEventQuery(start) || cudaEventQuery(stop)) return cudaErrorNotReady;
  *out = std::chrono::duration<float, std::milli>(*((Event*)stop)->time - *((Event*)start)->time)
             .count();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t of, unsigned) {
  Event event = *(Event*)of;
  Stream* stream = stream_of(handle);
  if (event.stream && event.stream != stream)
    stream->put([event] { event.stream->wait(event.position); });
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t work, void* data) {
  stream_of(handle)->put([=] { work(data); });
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* out) {
  *out = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* out,
                                     unsigned long long*, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  *out = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

int fake_cuda_host_waits() { return host_waits; }

// What kernels.cpp does on the calling thread comes after what was queued.
void fake_cuda_before_kernel(void* stream) { stream_of((cudaStream_t)stream)->wait(); }

// --- devices ---------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* out) {
  *out = getenv("FAKE_CUDA_DEVICES") ? atoi(getenv("FAKE_CUDA_DEVICES")) : 4;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* out) {
  *out = device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int number) {
  device = number;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* out) {
  *out = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* out) { return cudaDriverGetVersion(out); }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int) {
  memset(out, 0, sizeof *out);
  strcpy(out->name, "NVIDIA H200");
  out->major = 9;
  out->totalGlobalMem = DEVICE_BYTES;
  out->multiProcessorCount = 132;
  out->warpSize = 32;
  out->maxThreadsPerBlock = 1024;
  out->maxThreadsPerMultiProcessor = 2048;
  out->sharedMemPerBlock = 49152;
  out->sharedMemPerBlockOptin = 232448;
  out->sharedMemPerMultiprocessor = 233472;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->l2CacheSize = 60 << 20;
  out->maxGridSize[0] = 2147483647;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->unifiedAddressing = 1;
  out->textureAlignment = 512;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr name, int) {
  *out = name == cudaDevAttrComputeCapabilityMajor            ? 9
         : name == cudaDevAttrMultiProcessorCount             ? 132
         : name == cudaDevAttrMaxSharedMemoryPerBlockOptin    ? 232448
                                                              : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* out, int length, int number) {
  snprintf(out, length, "0000:%02x:00.0", number);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* out, int, int) {
  *out = 0;
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// --- the driver -----------------------------------------------------------------------------------

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* out) {
  *out = 13000;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* out, int number) {
  *out = number;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* out) {
  cudaGetDeviceCount(out);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute name, CUdevice) {
  *out = name == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice) {
  *out = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* out) {
  *out = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** out) {
  *out = "fake CUDA";
  return CUDA_SUCCESS;
}
static CUresult unknown_function() { return CUDA_ERROR_NOT_SUPPORTED; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *out = dlsym(RTLD_DEFAULT, name);
  if (!*out) *out = (void*)unknown_function;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- NVML, of GPUs without NVLink -----------------------------------------------------------------

static constexpr int NVML_SUCCESS = 0, NVML_ERROR_NOT_SUPPORTED = 3;

int nvmlInit() { return NVML_SUCCESS; }
int nvmlInit_v2() { return NVML_SUCCESS; }
int nvmlShutdown() { return NVML_SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int* out) {
  cudaDriverGetVersion(out);
  return NVML_SUCCESS;
}
const char* nvmlErrorString(int) { return "fake NVML"; }
int nvmlDeviceGetCount_v2(unsigned* out) {
  cudaGetDeviceCount((int*)out);
  return NVML_SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void** out) {
  *out = (void*)(uintptr_t)(number + 1);
  return NVML_SUCCESS;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* name, void** out) {
  return nvmlDeviceGetHandleByIndex_v2(strtoul(name + strlen("0000:"), nullptr, 16), out);
}
int nvmlDeviceGetName(void*, char* out, unsigned length) {
  snprintf(out, length, "NVIDIA H200");
  return NVML_SUCCESS;
}
int nvmlDeviceGetUUID(void* handle, char* out, unsigned length) {
  snprintf(out, length, "GPU-00000000-0000-0000-0000-%012lx", (unsigned long)handle);
  return NVML_SUCCESS;
}
int nvmlDeviceGetNvLinkState(void*, unsigned, unsigned*) { return NVML_ERROR_NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NVML_ERROR_NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NVML_ERROR_NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkErrorCounter(void*, unsigned, int, unsigned long long*) {
  return NVML_ERROR_NOT_SUPPORTED;
}
int nvmlDeviceGetGpuFabricInfo(void*, void*) { return NVML_ERROR_NOT_SUPPORTED; }
struct FabricInfo {  // nvmlGpuFabricInfoV_t
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;  // 0: there is no fabric
};
int nvmlDeviceGetGpuFabricInfoV(void*, FabricInfo* out) {
  out->state = 0;
  return NVML_SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned*, void*) {
  return NVML_ERROR_NOT_SUPPORTED;
}

// --- kernels: none --------------------------------------------------------------------------------

static auto& kernel_names = *new std::map<const void*, std::string>;

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  kernel_names[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }

static cudaError_t nothing_done(const void* function) {
  static auto& told = *new std::set<const void*>;
  std::lock_guard<std::mutex> hold(table);
  if (told.insert(function).second) {
    auto found = kernel_names.find(function);
    const char* name = found == kernel_names.end() ? "unknown" : found->second.c_str();
    fprintf(stderr, "fake CUDA: kernel %s did nothing\n", name);
  }
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return nothing_done(function);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
  return nothing_done(function);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t,
                                        cudaStream_t) {
  return nothing_done(function);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t function, dim3, dim3, void**, size_t, cudaStream_t) {
  return nothing_done(function);
}
cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* function) {
  *out = (cudaKernel_t)function;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->binaryVersion = out->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int, size_t) {
  *out = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int,
                                                                   size_t, unsigned) {
  *out = 2;
  return cudaSuccess;
}
static thread_local std::vector<std::tuple<dim3, dim3, size_t, void*>>* configurations;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  if (!configurations) configurations = new std::vector<std::tuple<dim3, dim3, size_t, void*>>;
  configurations->push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  std::tie(*grid, *block, *shared, *(void**)stream) = configurations->back();
  configurations->pop_back();
  return cudaSuccess;
}

}  // extern "C"

// --- NCCL -----------------------------------------------------------------------------------------

static constexpr size_t CHUNK = 1 << 20, LETTER = 1 << 16;
static constexpr int MOST_RANKS = 16;

struct alignas(64) Counter {
  std::atomic<uint64_t> value;
};
struct Box {  // from one rank to another
  Counter written, read;
  char bytes[LETTER];
};
struct Shared {
  Counter joined;
  Counter arrived[MOST_RANKS];
  struct {
    int color, key;
  } wishes[MOST_RANKS];
  char chunks[MOST_RANKS][CHUNK];
  Box boxes[MOST_RANKS][MOST_RANKS];
};
struct Comm {
  std::string name;
  int ranks, rank;
  Shared* shared;
  uint64_t rounds = 0;
  int splits = 0;
  std::mutex order;
  Event last;  // its last operation
  std::atomic<bool> aborted{false};
  std::atomic<int> running{0};

  template <class Condition>
  bool wait_until(Condition condition) {  // false: aborted
    for (int look = 0; !condition(); ++look) {
      if (aborted) return false;
      if (look < 100)
        std::this_thread::yield();
      else
        usleep(200);
    }
    return true;
  }
  bool meet() {
    shared->arrived[rank].value = ++rounds;
    for (int other = 0; other < ranks; ++other)
      if (!wait_until([&] { return shared->arrived[other].value >= rounds; })) return false;
    return true;
  }
  // Show all ranks `bytes` bytes, in chunks: consume(offset, length) finds them in shared->chunks.
  template <class Consume>
  void exchange(const void* mine, size_t bytes, Consume consume) {
    for (size_t offset = 0; offset < bytes && !aborted; offset += CHUNK) {
      size_t length = std::min(CHUNK, bytes - offset);
      if (mine) memcpy(shared->chunks[rank], (const char*)mine + offset, length);
      if (!meet()) return;
      consume(offset, length);
      if (!meet()) return;
    }
  }
};

static Shared* open_shared(const std::string& name, int ranks, const std::atomic<bool>& aborted) {
  std::string path = "/dev/shm/fake-nccl-" + name;
  int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared))) abort();
  auto* shared = (Shared*)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (shared->joined.value.fetch_add(1) + 1 == (uint64_t)ranks) unlink(path.c_str());
  while (shared->joined.value < (uint64_t)ranks && !aborted) usleep(200);
  return shared;
}

static size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 4;
  }
}

struct Bfloat16 {
  uint16_t bits = 0;
  Bfloat16() = default;
  operator float() const {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  Bfloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = value != value ? 0x7fff : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
};

static auto& factors = *new std::vector<double>;  // of ncclRedOpCreatePreMulSum

template <class T, class Sum>
static void reduce(Comm* comm, size_t offset, size_t count, int op, char* to) {
  double factor = op >= (int)ncclNumOps ? factors[op - ncclNumOps] : 1;
  for (size_t i = 0; i < count; ++i) {
    Sum sum = 0;
    for (int rank = 0; rank < comm->ranks; ++rank) {
      T element;
      memcpy(&element, comm->shared->chunks[rank] + offset + i * sizeof(T), sizeof(T));
      Sum value = (Sum)element;
      if (op >= (int)ncclNumOps) value = (Sum)(value * factor);
      if (!rank) sum = value;
      else if (op == ncclProd) sum = sum * value;
      else if (op == ncclMax) sum = value > sum || value != value ? value : sum;
      else if (op == ncclMin) sum = value < sum || value != value ? value : sum;
      else sum = sum + value;
    }
    if (op == ncclAvg) sum = sum / (Sum)comm->ranks;
    T result = (T)sum;
    memcpy(to + i * sizeof(T), &result, sizeof(T));
  }
}

static void reduce(Comm* comm, size_t offset, size_t bytes, ncclDataType_t type, int op, char* to) {
  size_t count = bytes / size_of(type);
  switch (type) {
    case ncclInt8: return reduce<int8_t, int8_t>(comm, offset, count, op, to);
    case ncclUint8: return reduce<uint8_t, uint8_t>(comm, offset, count, op, to);
    case ncclInt32: return reduce<int32_t, int32_t>(comm, offset, count, op, to);
    case ncclUint32: return reduce<uint32_t, uint32_t>(comm, offset, count, op, to);
    case ncclInt64: return reduce<int64_t, int64_t>(comm, offset, count, op, to);
    case ncclUint64: return reduce<uint64_t, uint64_t>(comm, offset, count, op, to);
    case ncclFloat64: return reduce<double, double>(comm, offset, count, op, to);
    case ncclFloat16: return reduce<_Float16, float>(comm, offset, count, op, to);
    case ncclBfloat16: return reduce<Bfloat16, float>(comm, offset, count, op, to);
    default: return reduce<float, float>(comm, offset, count, op, to);
  }
}

// The bytes that two ranges (start, length) share, as (start, length).
static std::pair<size_t, size_t> common(size_t a, size_t a_length, size_t b, size_t b_length) {
  size_t start = std::max(a, b), stop = std::min(a + a_length, b + b_length);
  return {start, stop > start ? stop - start : 0};
}

// The operations of a communicator come in the order of their calls, whatever stream they are on.
static ncclResult_t queue(ncclComm_t handle, cudaStream_t on, std::function<void(Comm*)> work) {
  auto* comm = (Comm*)handle;
  Stream* stream = stream_of(on);
  std::lock_guard<std::mutex> hold(comm->order);
  Event before = comm->last;
  comm->last.stream = stream;
  comm->last.position = stream->put([=] {
    if (before.stream && before.stream != stream) before.stream->wait(before.position);
    ++comm->running;
    if (!comm->aborted) work(comm);
    --comm->running;
  });
  return ncclSuccess;
}

struct Letter {
  bool send;
  char* bytes;
  size_t length;
  int peer;
  Comm* comm;
  cudaStream_t stream;
  size_t done = 0;
  bool step() {  // true: moved
    auto* shared = comm->shared;
    Box& box = send ? shared->boxes[comm->rank][peer] : shared->boxes[peer][comm->rank];
    bool full = box.written.value != box.read.value;
    if (done == length || full == send) return false;
    size_t now = std::min(LETTER, length - done);
    if (send) {
      memcpy(box.bytes, bytes + done, now);
      ++box.written.value;
    } else {
      memcpy(bytes + done, box.bytes, now);
      ++box.read.value;
    }
    done += now;
    return true;
  }
};
static thread_local int group_depth = 0;
static thread_local std::vector<Letter>* group;

static void post(std::vector<Letter> letters) {
  std::map<std::pair<Comm*, cudaStream_t>, std::vector<Letter>> by_stream;
  for (auto& letter : letters) by_stream[{letter.comm, letter.stream}].push_back(letter);
  for (auto& [key, some] : by_stream)
    queue((ncclComm_t)key.first, key.second, [some = some](Comm* comm) mutable {
      comm->wait_until([&] {
        bool all = true;
        for (size_t i = 0; i < some.size(); ++i) {
          bool turn = true;  // those to or from the same rank come in order
          for (size_t j = 0; j < i; ++j)
            turn &= some[j].done == some[j].length || some[j].send != some[i].send ||
                    some[j].peer != some[i].peer;
          if (turn) some[i].step();
          all &= some[i].done == some[i].length;
        }
        return all;
      });
    });
}

static ncclResult_t letter(bool send, void* bytes, size_t count, ncclDataType_t type, int peer,
                           ncclComm_t comm, cudaStream_t stream) {
  Letter made{send, (char*)bytes, count * size_of(type), peer, (Comm*)comm, stream};
  if (group_depth) {
    if (!group) group = new std::vector<Letter>;
    group->push_back(made);
  } else {
    post({made});
  }
  return ncclSuccess;
}

extern "C" {

ncclResult_t ncclGetVersion(int* out) {
  *out = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* out) {
  memset(out, 0, sizeof *out);
  uint64_t number[2];
  FILE* random = fopen("/dev/urandom", "r");
  if (fread(number, sizeof number, 1, random) != 1) abort();
  fclose(random);
  snprintf(out->internal, sizeof out->internal, "%016lx%016lx", number[0], number[1]);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
  if (ranks > MOST_RANKS) return ncclInvalidUsage;
  auto* comm = new Comm{id.internal, ranks, rank, nullptr};
  *out = (ncclComm_t)comm;
  comm->shared = open_shared(comm->name, ranks, comm->aborted);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* out, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(out, ranks, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int ranks, int rank, int, ncclUniqueId* ids,
                                      ncclConfig_t* config) {
  return ncclCommInitRankConfig(out, ranks, ids[0], rank, config);
}
ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  auto* comm = (Comm*)handle;
  std::string name = comm->name + "-" + std::to_string(++comm->splits);
  Shared* shared = open_shared(name, comm->ranks, comm->aborted);
  shared->wishes[comm->rank] = {color, key};
  ++shared->arrived[comm->rank].value;
  std::set<std::pair<int, int>> members;
  for (int other = 0; other < comm->ranks; ++other) {
    comm->wait_until([&] { return shared->arrived[other].value > 0; });
    if (shared->wishes[other].color == color) members.insert({shared->wishes[other].key, other});
  }
  munmap(shared, sizeof(Shared));
  *out = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  int rank = std::distance(members.begin(), members.find({key, comm->rank}));
  auto* made = new Comm{name + "-" + std::to_string(color), (int)members.size(), rank, nullptr};
  made->shared = open_shared(made->name, made->ranks, made->aborted);
  *out = (ncclComm_t)made;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t handle) {
  auto* comm = (Comm*)handle;  // never freed: its stream may still come to it
  comm->aborted = true;
  while (comm->running) usleep(200);
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* out) {
  *out = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* out) {
  *out = ((Comm*)comm)->ranks;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* out) {
  *out = ((Comm*)comm)->rank;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "fake NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return "fake NCCL"; }
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** out) {
  *out = nullptr;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* out, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t, ncclComm_t) {
  double factor = type == ncclFloat64    ? *(double*)scalar
                  : type == ncclFloat16  ? (double)*(_Float16*)scalar
                  : type == ncclBfloat16 ? (double)(float)*(Bfloat16*)scalar
                                         : (double)*(float*)scalar;
  std::lock_guard<std::mutex> hold(table);
  factors.push_back(factor);
  *out = (ncclRedOp_t)(ncclNumOps + factors.size() - 1);
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t handle, cudaStream_t stream) {
  return queue(handle, stream, [=](Comm* comm) {
    comm->exchange(from, count * size_of(type), [=](size_t offset, size_t length) {
      reduce(comm, 0, length, type, op, (char*)to + offset);
    });
  });
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t handle, cudaStream_t stream) {
  return queue(handle, stream, [=](Comm* comm) {
    comm->exchange(from, count * size_of(type), [=](size_t offset, size_t length) {
      if (comm->rank == root) reduce(comm, 0, length, type, op, (char*)to + offset);
    });
  });
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t handle, cudaStream_t stream) {
  return queue(handle, stream, [=](Comm* comm) {
    size_t part = count * size_of(type), first = comm->rank * part;
    comm->exchange(from, comm->ranks * part, [=](size_t offset, size_t length) {
      auto [start, bytes] = common(offset, length, first, part);
      reduce(comm, start - offset, bytes, type, op, (char*)to + (start - first));
    });
  });
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t handle, cudaStream_t stream) {
  return queue(handle, stream, [=](Comm* comm) {
    size_t part = count * size_of(type);
    comm->exchange(from, part, [=](size_t offset, size_t length) {
      for (int rank = 0; rank < comm->ranks; ++rank)
        memcpy((char*)to + rank * part + offset, comm->shared->chunks[rank], length);
    });
  });
}
ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type,
                          ncclComm_t handle, cudaStream_t stream) {
  return queue(handle, stream, [=](Comm* comm) {
    size_t part = count * size_of(type), first = comm->rank * part;
    comm->exchange(from, comm->ranks * part, [=](size_t offset, size_t length) {
      auto [start, bytes] = common(offset, length, first, part);
      for (int rank = 0; bytes && rank < comm->ranks; ++rank)
        memcpy((char*)to + rank * part + (start - first),
               comm->shared->chunks[rank] + (start - offset), bytes);
    });
  });
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t handle, cudaStream_t stream) {
  return queue(handle, stream, [=](Comm* comm) {
    const void* mine = comm->rank == root ? from : nullptr;
    comm->exchange(mine, count * size_of(type), [=](size_t offset, size_t length) {
      memcpy((char*)to + offset, comm->shared->chunks[root], length);
    });
  });
}
ncclResult_t ncclBcast(void* bytes, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return ncclBroadcast(bytes, bytes, count, type, root, comm, stream);
}
ncclResult_t ncclSend(const void* bytes, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return letter(true, (void*)bytes, count, type, peer, comm, stream);
}
ncclResult_t ncclRecv(void* bytes, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return letter(false, bytes, count, type, peer, comm, stream);
}
ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--group_depth == 0 && group && !group->empty()) {
    post(*group);
    group->clear();
  }
  return ncclSuccess;
}

}  // extern "C"
