#pragma once

#include <string>

/// The environment of the process that Herring is a guest in.
namespace herring::efa {

/// A variable that is set as long as this lives, for a library that takes a setting from nowhere else. Not setenv():
/// that moves and rewrites the list which other threads may be reading with getenv(). Here they see the old list or a
/// new one, both whole at any time. What another thread sets or changes meanwhile stays; then so does the variable.
class TemporaryVariable final {
 public:
  TemporaryVariable(const std::string& name, const std::string& value);
  ~TemporaryVariable();
  TemporaryVariable(const TemporaryVariable&) = delete;
  TemporaryVariable& operator=(const TemporaryVariable&) = delete;

 private:
  char** before_ = nullptr;
  char** during_ = nullptr;
};

}  // namespace herring::efa
