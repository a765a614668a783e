#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <rdma/fabric.h>

#include "efa/fabric.h"

/// The libfabric shared object and the few entry points that are symbols; everything else goes through the operation
/// tables of the objects that they create.
namespace herring::efa {

struct InfoDeleter {
  void (*free)(fi_info*) = nullptr;
  void operator()(fi_info* info) const noexcept {
    if (info != nullptr) free(info);
  }
};
/// A list of fi_info as fi_getinfo returns it, or one copy of an element.
using InfoPtr = std::unique_ptr<fi_info, InfoDeleter>;

class Library final {
 public:
  /// Tries, in order: options.library (then nothing else), /opt/amazon/efa, the system's, options.search. A library
  /// older than 1.18 is taken only if no later one is newer: its tcp provider has no RDM endpoint of its own; where the
  /// name of the system's says so, it is tried last. Appends a line to `tried` for each file looked at. Null where
  /// nothing was found; never throws for that. Signal handlers are what they were (efa/signals.h).
  static std::shared_ptr<const Library> load(const FabricOptions& options, std::vector<std::string>& tried);

  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const std::string& path() const noexcept { return path_; }
  /// "2.5"
  std::string version_text() const;
  /// What to ask fi_getinfo for: the headers' version, or the library's where that is older.
  std::uint32_t api_version() const noexcept;
  /// The same where memory of devices is asked for: before 1.18 EFA knows too little of it, and what is newer changes
  /// nothing that the headers have.
  std::uint32_t device_api_version() const noexcept;

  InfoPtr allocate_info() const;
  InfoPtr duplicate(const fi_info* info) const;
  /// fi_getinfo: 0 and a list, or a negative fi_errno.
  int get_info(const fi_info* hints, InfoPtr& list) const { return get_info(api_version(), hints, list); }
  int get_info(std::uint32_t version, const fi_info* hints, InfoPtr& list) const;
  int open_fabric(fi_fabric_attr* attributes, fid_fabric** fabric) const;
  /// "Connection refused" for 111, "-111" or any fi_errno of either sign.
  std::string error_text(std::int64_t code) const;

 private:
  Library() = default;
  static std::shared_ptr<const Library> open(const std::string& file, std::string& reason);

  std::string path_;
  std::uint32_t version_ = 0;
  int (*get_info_)(std::uint32_t, const char*, const char*, std::uint64_t, const fi_info*, fi_info**) = nullptr;
  void (*free_info_)(fi_info*) = nullptr;
  fi_info* (*duplicate_info_)(const fi_info*) = nullptr;
  int (*fabric_)(fi_fabric_attr*, fid_fabric**, void*) = nullptr;
  const char* (*error_text_)(int) = nullptr;
  mutable std::atomic<bool> wants_plugins_ = false;  ///< Until the first fi_getinfo, which loads them.
};

}  // namespace herring::efa
