#include "cuda/driver.h"

#include <unistd.h>

#include <algorithm>
#include <array>

#include "cuda/shared_library.h"

namespace herring::cuda {
namespace {

[[noreturn]] void unavailable(const std::string& text) { throw Error(Code::kUnavailable, "cuda: " + text); }

std::string version_string(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// What to do about an error, where there is something to say; begins with a separator.
std::string advice(Result result) {
  switch (result) {
    case kNoDevice:
      return ": the driver sees no GPU (CUDA_VISIBLE_DEVICES, or a container without its devices)";
    case kInvalidDevice:
      return ": there is no GPU with this number (only those in CUDA_VISIBLE_DEVICES are numbered)";
    case kNotInitialized:
      return ": CUDA was in use before this process was forked; start it with spawn";
    case kSystemDriverMismatch:
      return ": library and kernel module are of different releases; restart the machine after an update";
    case kOutOfMemory:
      return ": not enough memory";
    case kDeviceUnavailable:
      return ": another process holds the GPU for itself (compute mode)";
    default:
      return {};
  }
}

}  // namespace

bool is_fatal(Result result) {
  constexpr std::array kFatal{
      kDeinitialized,     kDeviceUnavailable,   kEccUncorrectable, kNvlinkUncorrectable, kIllegalAddress,
      kLaunchTimeout,     kContextIsDestroyed,  kAssert,           kHardwareStackError,  kIllegalInstruction,
      kMisalignedAddress, kInvalidAddressSpace, kInvalidPc,        kLaunchFailed,        kUnknown};
  return std::ranges::find(kFatal, result) != kFatal.end();
}

std::shared_ptr<Driver> Driver::open(const std::string& library) {
  const std::shared_ptr<Driver> driver(new Driver());
  driver->load(library);
  return driver;
}

void Driver::load(const std::string& library) {
  const SharedLibrary opened(library);
  if (opened.handle == nullptr) unavailable("no driver on this machine (" + opened.problem + ")");
  handle_ = opened.handle;
  path_ = opened.path;
  // The version first: of an old driver, it is worth more than the name of what it lacks.
  api_.driver_get_version = reinterpret_cast<Api::driver_get_version_type*>(dlsym(handle_, "cuDriverGetVersion"));
  if (api_.driver_get_version == nullptr)
    unavailable(path_ + " has no symbol cuDriverGetVersion, so it is not a CUDA driver");
  if (api_.driver_get_version(&version_) != kSuccess) version_ = 0;
  if (version_ < kOldestVersion) {
    unavailable(path_ + " is a driver for CUDA " + version_string(version_) + ", older than " +
                version_string(kOldestVersion) + ": install a newer driver");
  }
#define HERRING_CUDA_RESOLVE(member, name, ...)                                            \
  api_.member = reinterpret_cast<Api::member##_type*>(dlsym(handle_, #name));              \
  if (api_.member == nullptr) {                                                            \
    unavailable(path_ + " (CUDA " + version_string(version_) +                             \
                ") has no symbol " #name ", which Herring needs: install another driver"); \
  }
  HERRING_CUDA_FUNCTIONS(HERRING_CUDA_RESOLVE)
#undef HERRING_CUDA_RESOLVE
  pid_ = getpid();
  if (const Status status = check(api_.init(0), "cuInit"); !status.is_ok())
    throw Error(Code::kUnavailable, status.message());
  if (const Status status = check(api_.device_get_count(&device_count_), "cuDeviceGetCount"); !status.is_ok()) {
    throw Error(Code::kUnavailable, status.message());
  }
  if (device_count_ == 0) unavailable("cuDeviceGetCount returned 0" + advice(kNoDevice));
}

// The library stays: torch or another user may hold pointers into it, and it has threads of its own.
Driver::~Driver() = default;

std::string Driver::version_text() const { return version_string(version_); }

GpuFacts Driver::facts(int number) const {
  check_process().or_throw();
  GpuFacts facts;
  facts.number = number;
  DeviceNumber device = 0;
  check(api_.device_get(&device, number), "cuDeviceGet").or_throw();
  char text[256] = {};
  check(api_.device_get_name(text, sizeof(text) - 1, device), "cuDeviceGetName").or_throw();
  facts.name = text;
  check(api_.device_get_pci_bus_id(text, sizeof(text) - 1, device), "cuDeviceGetPCIBusId").or_throw();
  facts.pci_bus_id = text;
  check(api_.device_total_mem(&facts.memory_bytes, device), "cuDeviceTotalMem").or_throw();
  const auto attribute = [&](int which) {
    int value = 0;
    check(api_.device_get_attribute(&value, which, device), "cuDeviceGetAttribute").or_throw();
    return value;
  };
  facts.major = attribute(kAttributeMajor);
  facts.minor = attribute(kAttributeMinor);
  facts.multiprocessors = attribute(kAttributeMultiprocessors);
  facts.copy_engines = attribute(kAttributeAsyncEngines);
  return facts;
}

std::vector<int> Driver::peers_of(int number) const {
  check_process().or_throw();
  DeviceNumber device = 0;
  check(api_.device_get(&device, number), "cuDeviceGet").or_throw();
  std::vector<int> peers;
  for (int other = 0; other < device_count_; ++other) {
    if (other == number) continue;
    DeviceNumber peer = 0;
    int can = 0;
    check(api_.device_get(&peer, other), "cuDeviceGet").or_throw();
    check(api_.device_can_access_peer(&can, device, peer), "cuDeviceCanAccessPeer").or_throw();
    if (can != 0) peers.push_back(other);
  }
  return peers;
}

Status Driver::check(Result result, const char* call) const {
  if (result == kSuccess) return Status::ok();
  const char* name = nullptr;
  const char* text = nullptr;
  if (api_.get_error_name(result, &name) != kSuccess || name == nullptr) name = "an error without a name";
  if (api_.get_error_string(result, &text) != kSuccess || text == nullptr) text = "";
  std::string message = "cuda: " + std::string(call) + " failed with " + name + " (" + std::to_string(result) + ")";
  if (*text != '\0') message += ", " + std::string(text);
  message += advice(result);
  if (is_fatal(result)) message += "; this process can no longer use the GPU: restart the process";
  const bool is_missing = result == kOutOfMemory || result == kNoDevice || result == kInvalidDevice;
  return {is_missing ? Code::kUnavailable : Code::kTransport, std::move(message)};
}

Status Driver::check_process() const {
  if (getpid() == pid_) return Status::ok();
  return {Code::kUnavailable, "cuda: this is a forked child (pid " + std::to_string(getpid()) + ") of the process " +
                                  std::to_string(pid_) +
                                  " that uses the GPU, which a child cannot; start workers with spawn"};
}

Survey survey(const std::string& library) {
  Survey found;
  try {
    const std::shared_ptr<Driver> driver = Driver::open(library);
    found.library = driver->path();
    found.version = driver->version_text();
    for (int i = 0; i < driver->device_count(); ++i) {
      found.gpus.push_back(driver->facts(i));
      found.gpus.back().peers = driver->peers_of(i);
    }
  } catch (const Error& error) {
    found.problem = error.status().message();
  }
  return found;
}

}  // namespace herring::cuda
