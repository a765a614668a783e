#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "cuda/prototypes.h"

/// CUDA's driver, opened when it is first needed and never linked: a machine without it loses nothing.
namespace herring::cuda {

/// What a GPU says of itself without a context, which would take memory on it.
struct GpuFacts {
  int number = 0;
  std::string name;
  std::string pci_bus_id;
  std::size_t memory_bytes = 0;
  int major = 0;  ///< Compute capability.
  int minor = 0;
  int multiprocessors = 0;
  int copy_engines = 0;    ///< 2 or more: copies both ways at once.
  std::vector<int> peers;  ///< The GPUs of this process whose memory it can reach; a survey fills it in.
};

class Driver final {
 public:
  static constexpr const char* kLibrary = "libcuda.so.1";
  static constexpr int kOldestVersion = 11000;   ///< As the driver counts: CUDA 11.0.
  static constexpr int kKernelsVersion = 11080;  ///< The kernels' PTX needs so much.

  /// Opens and initialises it. Throws Error(kUnavailable): no library, a symbol missing, too old, or no GPU; the text
  /// says which, and what to do. Not in a process that forks afterwards: the child cannot use it.
  static std::shared_ptr<Driver> open(const std::string& library = kLibrary);
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  const Api& api() const { return api_; }
  int version() const { return version_; }
  std::string version_text() const;  ///< "12.4"
  const std::string& path() const { return path_; }
  int device_count() const { return device_count_; }
  GpuFacts facts(int number) const;
  /// The GPUs of this process whose memory this one can reach.
  std::vector<int> peers_of(int number) const;

  /// Ok where `result` is success; else a Status that names the call, the error and its text.
  Status check(Result result, const char* call) const;
  /// Not ok in a child of the process that opened the driver.
  Status check_process() const;

 private:
  Driver() = default;
  void load(const std::string& library);

  void* handle_ = nullptr;
  Api api_;
  std::string path_;
  int version_ = 0;
  int device_count_ = 0;
  pid_t pid_ = 0;
};

/// The context does nothing any more after this error: only a new process helps.
bool is_fatal(Result result);

/// For people who ask what is there (herring doctor). Never throws.
struct Survey {
  std::string problem;  ///< Empty: the driver answers.
  std::string library;
  std::string version;
  std::vector<GpuFacts> gpus;
};
Survey survey(const std::string& library = Driver::kLibrary);

}  // namespace herring::cuda
