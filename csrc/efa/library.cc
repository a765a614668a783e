#include "efa/library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "efa/environment.h"
#include "efa/signals.h"

namespace herring::efa {
namespace {

constexpr std::uint32_t kOldestVersion = FI_VERSION(1, 12);
constexpr std::uint32_t kFirstWithTcpRdm = FI_VERSION(1, 18);
constexpr const char* kSoname = "libfabric.so.1";

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
/// in its build machine's prefix and takes another place from the environment only: FI_PROVIDER_PATH. Its value where
/// it is to be set, for the first fi_getinfo, which loads the plug-ins: only where there is an RDMA device to use them
/// with. Empty: not to be set.
std::string plugin_path(const std::string& library) {
  std::error_code ignored;
  if (std::getenv("FI_PROVIDER_PATH") != nullptr) return {};
  if (std::filesystem::is_empty("/sys/class/infiniband", ignored) || ignored) return {};
  std::string value;
  for (const char* plugin : {"libefa-fi.so", "libverbs-fi.so"}) {
    const auto file = std::filesystem::path(library).parent_path() / "libfabric" / plugin;
    if (!std::filesystem::exists(file, ignored)) continue;
    value += (value.empty() ? "+" : ":+") + file.string();
  }
  return value;
}

/// The folders of LD_LIBRARY_PATH and the system's own, as the loader has them.
std::vector<std::string> loader_folders() {
  std::vector<std::string> folders;
  void* const program = dlopen(nullptr, RTLD_LAZY);
  Dl_serinfo size{};
  if (program != nullptr && dlinfo(program, RTLD_DI_SERINFOSIZE, &size) == 0) {
    std::vector<std::max_align_t> memory(size.dls_size / sizeof(std::max_align_t) + 1);
    auto* const found = reinterpret_cast<Dl_serinfo*>(memory.data());
    *found = size;
    if (dlinfo(program, RTLD_DI_SERINFO, found) == 0) {
      for (unsigned i = 0; i < found->dls_cnt; ++i) folders.emplace_back(found->dls_serpath[i].dls_name);
    }
  }
  if (program != nullptr) dlclose(program);
  return folders;
}

/// Every libfabric.so.1 that the loader might take for that name: of its folders, and of the cache of all others.
std::vector<std::string> system_libraries() {
  std::vector<std::string> files;
  std::error_code ignored;
  const std::string end = std::string("/") + kSoname;
  for (const std::string& folder : loader_folders()) {
    if (std::filesystem::exists(folder + end, ignored)) files.push_back(folder + end);
  }
  std::ifstream file("/etc/ld.so.cache", std::ios::binary);
  const std::string cache((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::string entry = end + '\0';
  for (std::size_t at = cache.find(entry); at != std::string::npos; at = cache.find(entry, at + 1)) {
    const std::size_t before =
        cache.find_last_of('\0', at);  // Its strings are whole paths, each with a zero at its end.
    files.push_back(cache.substr(before + 1, at - before - 1) + end);
  }
  return files;
}

/// Whether the name of what `file` leads to says that it is older than kFirstWithTcpRdm.
bool has_old_name(const std::string& file) {
  constexpr std::string_view kPrefix = "libfabric.so.1.";
  constexpr int kNumberOf117 = 20;  // libtool's, which grows from release to release: 1.17.0 is libfabric.so.1.20.0.
  std::error_code failed;
  const std::string name = std::filesystem::canonical(file, failed).filename();
  if (failed || !name.starts_with(kPrefix)) return false;
  int number = 0;
  const auto [stopped, error] = std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), number);
  return error == std::errc{} && number <= kNumberOf117;
}

/// Whether the system has a libfabric that is older than kFirstWithTcpRdm and none besides. It is loaded only where
/// there is no other: Debian's 1.17 brings the libraries of old adapters, which take signal handlers and look for their
/// devices, all for a library that is then not taken.
bool has_old_system_library() {
  const std::vector<std::string> files = system_libraries();
  return !files.empty() && std::all_of(files.begin(), files.end(), has_old_name);
}

}  // namespace

std::shared_ptr<const Library> Library::open(const std::string& file, std::string& reason) {
  // RTLD_NODELETE: providers start threads and register exit handlers; unloading under them crashes.
  const SignalGuard guard;
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* text = dlerror();
    reason = text != nullptr ? text : "dlopen failed";
    // The caller names the file.
    const std::string named = file + ": ";
    if (reason.starts_with(named)) reason.erase(0, named.size());
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
    files = {"/opt/amazon/efa/lib64/libfabric.so.1", "/opt/amazon/efa/lib/libfabric.so.1"};
    files.insert(files.end(), options.search.begin(), options.search.end());
    files.insert(has_old_system_library() ? files.end() : files.begin() + 2, kSoname);
  }
  std::shared_ptr<const Library> fallback;
  for (const std::string& file : files) {
    std::string reason;
    auto library = open(file, reason);
    if (library == nullptr) {
      tried.push_back(file + ": " + reason);
      continue;
    }
    library->wants_plugins_ = options.provider != "tcp";
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

std::uint32_t Library::device_api_version() const noexcept {
  return std::min<std::uint32_t>(version_, FI_VERSION(1, 20));
}

InfoPtr Library::allocate_info() const { return duplicate(nullptr); }

InfoPtr Library::duplicate(const fi_info* info) const {
  InfoPtr copy(duplicate_info_(info), InfoDeleter{free_info_});
  if (copy == nullptr) throw Error(Code::kInternal, "fi_dupinfo: out of memory");
  return copy;
}

int Library::get_info(std::uint32_t version, const fi_info* hints, InfoPtr& list) const {
  const SignalGuard guard;
  std::optional<TemporaryVariable> plugins;
  if (wants_plugins_.exchange(false)) {
    const std::string path = plugin_path(path_);
    if (!path.empty()) plugins.emplace("FI_PROVIDER_PATH", path);
  }
  fi_info* found = nullptr;
  const int result = get_info_(version, nullptr, nullptr, 0, hints, &found);
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
