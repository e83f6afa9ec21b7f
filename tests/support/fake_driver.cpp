// Stands in for libcuda and libamdhip64: it loads any image, finds a kernel whose name the image has, and writes down
// the launches. The values of a launch are read from the addresses that it gets, as a driver does.

#include <cstdint>
#include <cstring>
#include <map>
#include <string>

extern "C" {

struct Launch {
    uint32_t sizes[7];
    int64_t stream;
    uint64_t values[16];
};

Launch last;
int launches = 0, loads = 0, count = 0, most_shared = 0, status = 0;
static std::map<const void*, std::string> images;

static int load(void** module, const void* image) {
    ++loads;
    const char* text = static_cast<const char*>(image);
    size_t size = std::strncmp(text + 1, "ELF", 3) ? std::strlen(text) : size_t(1) << 13;
    images[*module = new int] = std::string(text, size);
    return images[*module].find("BROKEN") == std::string::npos ? 0 : 218;
}

static int function(void** made, void* module, const char* name) {
    *made = module;
    return images[module].find(name) == std::string::npos ? 500 : 0;
}

static int attribute(int* value, int which, void*) {
    *value = which == 0 ? 1024 : 0;
    return 0;
}

static int launch(void*, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz, uint32_t shared,
    void* stream, void** params, void**) {
    ++launches;
    last = {{gx, gy, gz, bx, by, bz, shared}, reinterpret_cast<int64_t>(stream), {}};
    for (int i = 0; i < count; ++i) std::memcpy(&last.values[i], params[i], 8);
    return status;
}

int cuModuleLoadDataEx(void** module, const void* image, unsigned, int*, void** values) {
    int wrong = load(module, image);
    if (wrong) std::strcpy(static_cast<char*>(values[0]), "ptxas application ptx input, line 7; error : unknown");
    return wrong;
}
int cuModuleGetFunction(void** made, void* module, const char* name) { return function(made, module, name); }
int cuFuncGetAttribute(int* value, int which, void* f) { return attribute(value, which, f); }
int cuFuncSetAttribute(void*, int, int value) { return most_shared = value, 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = nullptr, 0; }
int cuCtxSetCurrent(void*) { return 0; }
struct Config {
    uint32_t sizes[7];
    void *stream, *attributes;
    uint32_t count;
};
int cuLaunchKernelEx(const Config* at, void* f, void** params, void** extra) {
    const uint32_t* n = at->sizes;
    return at->count ? 1 : launch(f, n[0], n[1], n[2], n[3], n[4], n[5], n[6], at->stream, params, extra);
}
int cuLaunchKernel(void* f, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz,
    uint32_t shared, void* stream, void** params, void** extra) {
    return launch(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
}
int cuGetErrorString(int, const char** text) { return *text = "the stand-in refused", 0; }

int hipModuleLoadData(void** module, const void* image) { return load(module, image); }
int hipModuleGetFunction(void** made, void* module, const char* name) { return function(made, module, name); }
int hipFuncGetAttribute(int* value, int which, void* f) { return attribute(value, which, f); }
int hipSetDevice(int) { return 0; }
int hipModuleLaunchKernel(void* f, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz,
    uint32_t shared, void* stream, void** params, void** extra) {
    return launch(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
}
const char* hipGetErrorString(int) { return "the stand-in refused"; }
}
