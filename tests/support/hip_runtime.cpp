// In place of the HIP runtime, where there is no GPU: a launch goes to a function that the test has set.
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

struct Dim3 {
    uint32_t x, y, z;
};
using Launch = void (*)(
    const char* kernel, const uint32_t* grid, const uint32_t* block, void** arguments, size_t shared);

// Host stub -> mangled name of the kernel. Made when first asked for: the stubs are registered before constructors run.
static std::map<const void*, std::string>& names() {
    static std::map<const void*, std::string> held;
    return held;
}
static Launch launch;
static struct {
    Dim3 grid, block;
    size_t shared;
    void* stream;
} configured;

extern "C" {
// The device code, which nobody reads.
char __hip_fatbin[64], __hip_fatbin_[64];
void* __hip_gpubin_handle_;
void set_launch(Launch function) { launch = function; }
void** __hipRegisterFatBinary(const void*) {
    static void* module;
    return &module;
}
void __hipUnregisterFatBinary(void**) {}
void __hipRegisterFunction(
    void**, const void* stub, char*, const char* name, unsigned, void*, void*, void*, void*, int*) {
    names()[stub] = name;
}
void __hipRegisterVar(void**, void*, char*, char*, int, size_t, int, int) {}
int __hipPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void* stream) {
    configured = {grid, block, shared, stream};
    return 0;
}
int __hipPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void** stream) {
    *grid = configured.grid, *block = configured.block, *shared = configured.shared, *stream = configured.stream;
    return 0;
}
int hipLaunchKernel(const void* stub, Dim3 grid, Dim3 block, void** arguments, size_t shared, void*) {
    launch(names().at(stub).c_str(), &grid.x, &block.x, arguments, shared);
    return 0;
}
int hipGetLastError() { return 0; }
int hipGetDevice(int* device) {
    *device = 0;
    return 0;
}
// hipDeviceAttributeMultiprocessorCount is the small one; all others are the bytes of LDS.
int hipDeviceGetAttribute(int* value, int what, int) {
    *value = what == MULTIPROCESSORS ? 2 : 65536;
    return 0;
}
int hipMemsetAsync(void* into, int value, size_t size, void*) {
    __builtin_memset(into, value, size);
    return 0;
}
}
