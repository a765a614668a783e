#include "efa/environment.h"

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstring>

namespace herring::efa {
namespace {

std::atomic_ref<char**> list() { return std::atomic_ref<char**>(environ); }

}  // namespace

TemporaryVariable::TemporaryVariable(const std::string& name, const std::string& value) : before_(list().load()) {
  std::size_t count = 0;
  while (before_ != nullptr && before_[count] != nullptr) ++count;
  // Never freed: another thread may be in the middle of it, or has copied what points to it. A few kilobytes.
  const std::string entry = name + "=" + value;
  auto* const text = new char[entry.size() + 1];
  std::memcpy(text, entry.c_str(), entry.size() + 1);
  during_ = new char*[count + 2];
  during_[0] = text;
  for (std::size_t i = 0; i < count; ++i) during_[i + 1] = before_[i];
  during_[count + 1] = nullptr;
  list().store(during_);
}

TemporaryVariable::~TemporaryVariable() { list().compare_exchange_strong(during_, before_); }

}  // namespace herring::efa
