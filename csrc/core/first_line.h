#pragma once

#include <filesystem>
#include <fstream>
#include <string>

namespace herring {

/// Of a file of the kernel's; empty where it cannot be read.
inline std::string first_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace herring
