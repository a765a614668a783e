#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "core/device_collectives.h"
#include "cuda/nccl_prototypes.h"

/// NCCL, opened when it is first needed and never linked.
namespace herring::cuda {

class Nccl final : public DeviceCollectivesLibrary, public std::enable_shared_from_this<Nccl> {
 public:
  static constexpr const char* kLibrary = "libnccl.so.2";
  static constexpr int kOldestVersion = nccl_version(2, 18, 0);
  static constexpr std::uint32_t kMostBlocks = 32;  ///< NCCL takes no more in all of its releases.

  /// The one that this process has already (torch's), else by the loader's search path. Throws Error(kUnavailable): no
  /// library, a symbol missing, too old; the text says which, and what to do.
  static std::shared_ptr<Nccl> open(const std::string& library = kLibrary);

  std::string description() const override;
  Id make_id() override;
  std::unique_ptr<DeviceCollectives> connect(const Id& id, std::uint32_t members, std::uint32_t index,
                                             std::uint32_t blocks) override;

  const NcclApi& api() const { return api_; }
  const std::string& path() const { return path_; }
  int version() const { return version_; }
  /// Ok, kAgain for what is in progress, else a Status that names the call, NCCL's error and what it said last.
  Status check(NcclResult result, const char* call, NcclCommunicator communicator) const;

 private:
  Nccl() = default;
  void load(const std::string& library);

  NcclApi api_;
  std::string path_;
  int version_ = 0;
};

}  // namespace herring::cuda
