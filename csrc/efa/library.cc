#include "efa/library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <utility>

namespace herring::efa {
namespace {

constexpr std::uint32_t kOldestVersion = FI_VERSION(1, 12);
constexpr std::uint32_t kFirstWithTcpRdm = FI_VERSION(1, 18);

std::string version_string(std::uint32_t version) {
  return std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
}

template <class Function>
bool resolve(void* handle, const char* name, Function& function, std::string& reason) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) reason = std::string("has no symbol ") + name + ", so it is not libfabric";
  return function != nullptr;
}

std::string loaded_path(void* handle, const std::string& fallback) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_name != nullptr && *map->l_name != '\0') {
    return map->l_name;
  }
  return fallback;
}

/// Wheels carry the efa and verbs providers as plug-ins beside the library, but the library was built to look for them
/// in its build machine's prefix and takes another place from the environment only. So the variable is set for the
/// duration of the first fi_getinfo, which loads the plug-ins, and only where there is an RDMA device to use them with.
class PluginPath final {
 public:
  explicit PluginPath(const std::string& library) {
    std::error_code ignored;
    if (std::getenv(kVariable) != nullptr) return;
    if (std::filesystem::is_empty("/sys/class/infiniband", ignored) || ignored) return;
    std::string value;
    for (const char* plugin : {"libefa-fi.so", "libverbs-fi.so"}) {
      const auto file = std::filesystem::path(library).parent_path() / "libfabric" / plugin;
      if (!std::filesystem::exists(file, ignored)) continue;
      value += (value.empty() ? "+" : ":+") + file.string();
    }
    if (value.empty()) return;
    set_ = setenv(kVariable, value.c_str(), 0) == 0;
  }
  ~PluginPath() {
    if (set_) unsetenv(kVariable);
  }
  PluginPath(const PluginPath&) = delete;
  PluginPath& operator=(const PluginPath&) = delete;

 private:
  static constexpr const char* kVariable = "FI_PROVIDER_PATH";
  bool set_ = false;
};

}  // namespace

std::shared_ptr<const Library> Library::open(const std::string& file, std::string& reason) {
  // RTLD_NODELETE: providers start threads and register exit handlers; unloading under them crashes.
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* text = dlerror();
    reason = text != nullptr ? text : "dlopen failed";
    return nullptr;
  }
  std::shared_ptr<Library> library(new Library);
  library->path_ = loaded_path(handle, file);
  std::uint32_t (*version)() = nullptr;
  const bool complete = resolve(handle, "fi_version", version, reason) &&
                        resolve(handle, "fi_getinfo", library->get_info_, reason) &&
                        resolve(handle, "fi_freeinfo", library->free_info_, reason) &&
                        resolve(handle, "fi_dupinfo", library->duplicate_info_, reason) &&
                        resolve(handle, "fi_fabric", library->fabric_, reason) &&
                        resolve(handle, "fi_strerror", library->error_text_, reason);
  dlclose(handle);  // Gives back the count only; RTLD_NODELETE keeps the code.
  if (!complete) return nullptr;
  library->version_ = version();
  if (library->version_ < kOldestVersion) {
    reason = "version " + library->version_text() + " is older than " + version_string(kOldestVersion);
    return nullptr;
  }
  return library;
}

std::shared_ptr<const Library> Library::load(const FabricOptions& options, std::vector<std::string>& tried) {
  std::vector<std::string> files;
  if (!options.library.empty()) {
    files.push_back(options.library);
  } else {
    files = {"/opt/amazon/efa/lib64/libfabric.so.1", "/opt/amazon/efa/lib/libfabric.so.1", "libfabric.so.1"};
    files.insert(files.end(), options.search.begin(), options.search.end());
  }
  std::shared_ptr<const Library> fallback;
  for (const std::string& file : files) {
    std::string reason;
    auto library = open(file, reason);
    if (library == nullptr) {
      tried.push_back(file + ": " + reason);
      continue;
    }
    const bool good = library->version_ >= kFirstWithTcpRdm || &file == &files.back();
    if (good && (fallback == nullptr || library->version_ >= kFirstWithTcpRdm)) {
      tried.push_back(file + ": version " + library->version_text() + ", taken");
      return library;
    }
    tried.push_back(file + ": version " + library->version_text() +
                    ", taken if none is newer (tcp is better from 1.18 on)");
    if (fallback == nullptr) fallback = std::move(library);
  }
  return fallback;
}

std::string Library::version_text() const { return version_string(version_); }

std::uint32_t Library::api_version() const noexcept {
  return std::min<std::uint32_t>(version_, FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION));
}

InfoPtr Library::allocate_info() const { return duplicate(nullptr); }

InfoPtr Library::duplicate(const fi_info* info) const {
  InfoPtr copy(duplicate_info_(info), InfoDeleter{free_info_});
  if (copy == nullptr) throw Error(Code::kInternal, "fi_dupinfo: out of memory");
  return copy;
}

int Library::get_info(const fi_info* hints, InfoPtr& list) const {
  const PluginPath plugins(path_);
  fi_info* found = nullptr;
  const int result = get_info_(api_version(), nullptr, nullptr, 0, hints, &found);
  list = InfoPtr(found, InfoDeleter{free_info_});
  return result;
}

int Library::open_fabric(fi_fabric_attr* attributes, fid_fabric** fabric) const {
  return fabric_(attributes, fabric, nullptr);
}

std::string Library::error_text(std::int64_t code) const {
  const std::int64_t positive = code < 0 ? -code : code;
  if (positive > std::numeric_limits<int>::max()) return "error " + std::to_string(code);
  const char* text = error_text_(static_cast<int>(positive));
  return text != nullptr ? text : "error " + std::to_string(code);
}

}  // namespace herring::efa
