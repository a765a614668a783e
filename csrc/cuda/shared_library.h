#pragma once

#include <dlfcn.h>
#include <link.h>

#include <string>

namespace herring::cuda {

/// A library that is opened when it is needed, and stays: it has threads of its own, and others may hold pointers into
/// it.
struct SharedLibrary {
  explicit SharedLibrary(const std::string& name) : handle(dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)), path(name) {
    if (handle == nullptr) {
      const char* const reason = dlerror();
      problem = reason == nullptr ? name : reason;
      return;
    }
    link_map* map = nullptr;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_name != nullptr && *map->l_name != '\0')
      path = map->l_name;
  }

  void* handle;         ///< Null: it could not be opened.
  std::string path;     ///< Where it is; as it was asked for where that is not known.
  std::string problem;  ///< Why it could not.
};

}  // namespace herring::cuda
