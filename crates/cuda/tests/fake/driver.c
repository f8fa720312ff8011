/* A CUDA driver that has one device and no memory: it answers as the environment tells it to, and prints what it was asked. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long word;

static int told(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

static int quiet(void) {
  static int is = -1;
  return is < 0 ? (is = told("FAKE_QUIET", 0)) : is;
}

static void asked(const char* what) {
  if (quiet()) return;
  printf("asked: %s\n", what);
  fflush(stdout);
}

int cuDriverGetVersion(int* version) { *version = told("FAKE_VERSION", 13000); return 0; }
int cuInit(unsigned flags) { return told("FAKE_INIT", 0); }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuGetErrorName(int code, const char** name) { *name = "CUDA_ERROR_FAKE"; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int bytes, int device) { strncpy(name, "Fake GPU", bytes); return 0; }
int cuDeviceGetPCIBusId(char* name, int bytes, int device) { strncpy(name, "0000:00:00.0", bytes); return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = 1 << 30; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 16: *value = told("FAKE_SMS", 65536); break;
    case 75: *value = told("FAKE_MAJOR", 9); break;
    case 76: *value = told("FAKE_MINOR", 0); break;
    case 97: *value = told("FAKE_SMEM", 65536); break;
    default: *value = 65536;
  }
  return 0;
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  *value = attribute == 1 ? told("FAKE_STATIC_SMEM", 1024) : 1024;
  return 0;
}
int cuOccupancyMaxActiveClusters(int* clusters, void* function, const void* config) { *clusters = 1; return 0; }
int cuEventQuery(void* event) { return told("FAKE_EVENT", 0); }

/* What a capture that is not relaxed forbids, as the driver does. */
static int capturing = 0, relaxed = 0;
static word captures = 0;
enum { CAPTURE_UNSUPPORTED = 900, RELAXED = 2 };
static int forbidden(void) { return capturing && !relaxed; }
int cuStreamCreate(void** stream, unsigned flags) { *stream = &capturing; return 0; }
int cuStreamBeginCapture_v2(void* stream, int mode) { capturing = 1; captures++; asked("capture"); return 0; }
int cuStreamEndCapture(void* stream, void** graph) { capturing = 0; asked("captured"); return 0; }
int cuStreamIsCapturing(void* stream, int* status) { *status = capturing && stream == &capturing; return 0; }
/* Captures have numbers of their own. */
int cuStreamGetCaptureInfo_v3(void* stream, int* status, word* id) {
  *status = capturing && stream == &capturing;
  *id = captures;
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  int before = relaxed;
  relaxed = *mode == RELAXED;
  *mode = before ? RELAXED : 0;
  return 0;
}
int cuGraphLaunch(void* graph, void* stream) { asked("replay"); return 0; }

static int zeroed = 0;
int cuMemAlloc_v2(word* address, size_t bytes) {
  if (forbidden()) return CAPTURE_UNSUPPORTED;
  /* All at one place, or each at its own. */
  static word apart = 0;
  *address = 0x10000000 + told("FAKE_APART", 0) * apart++;
  return told("FAKE_ALLOC", 0);
}
int cuMemsetD8Async(word address, char byte, size_t bytes, void* stream) {
  /* The memory of work counters: zeroed on a stream that is not the default one. */
  zeroed = address == 0x10000000 && byte == 0 && stream;
  return 0;
}
int cuMemcpyDtoH_v2(void* host, word address, size_t bytes) {
  memset(host, 0, bytes);
  memset(host, 1, 4 * told("FAKE_LEFT", 0));
  return 0;
}

int cuModuleLoadData(void** module, const void* image) {
  if (forbidden()) return CAPTURE_UNSUPPORTED;
  asked("load");
  *module = &zeroed;
  return told("FAKE_LOAD", 0);
}
int cuModuleUnload(void* module) { asked("unload"); return 0; }

/* A tensor map that says where its tensor is. */
int cuTensorMapEncodeTiled(word* map, int type, int rank, word address) {
  asked("encode");
  map[0] = address;
  return 0;
}
int cuTensorMapReplaceAddress(word* map, word address) { map[0] = address; return 0; }

/* The beginning of CUlaunchConfig. */
struct config { unsigned grid[3], block[3], smem_bytes; void* stream; };
int cuLaunchKernelEx(const struct config* config, void* function, void** arguments, void** extra) {
  const word* params = arguments[0];
  if (quiet()) return 0;
  if (told("FAKE_APART", 0)) printf("asked: workspace %llx\n", params[WORKSPACE_AT]);
  /* One line, whatever other threads print. */
  flockfile(stdout);
  printf("asked: launch counter %llx zeroed %d grid %u %u %u stream %d q %llx k %llx v %llx o %llx lse %llx maps",
         params[COUNTER_AT], zeroed, config->grid[0], config->grid[1], config->grid[2],
         config->stream == &capturing, params[0], params[1], params[2], params[3], params[4]);
  for (int i = 1; i <= told("FAKE_MAPS", 0); i++) printf(" %llx", ((word*)arguments[i])[0]);
  printf("\n");
  fflush(stdout);
  funlockfile(stdout);
  return told("FAKE_LAUNCH", 0);
}
