#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "bindings/core/buffer.h"
#include "bindings/core/python.h"
#include "core/copy.h"

namespace herring::python {
namespace {

/// A list of arrays of any library, looked at once: what Python would ask of each is most of a small one's time.
class PyArrays final {
 public:
  PyArrays(const py::sequence& arrays, bool writable) {
    arrays_.resize(arrays.size());
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      arrays_[i].take(arrays[i], writable ? Access::kWrite : Access::kRead, "array " + std::to_string(i));
    }
  }

  /// Which travel together, by their places: small ones of a type; the same for equal lists. One at a time, where it is
  /// large or has no elements.
  std::vector<std::vector<std::size_t>> parts(std::size_t most_bytes) const {
    std::vector<std::vector<std::size_t>> made;
    std::vector<std::pair<DataType, std::size_t>> open;
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      const std::size_t bytes = arrays_[i].bytes.size();
      const auto found = std::ranges::find(open, arrays_[i].dtype, [](const auto& each) { return each.first; });
      const bool travels = bytes > 0 && bytes <= most_bytes;
      if (travels && found != open.end()) {
        made[found->second].push_back(i);
        continue;
      }
      if (travels) open.emplace_back(arrays_[i].dtype, made.size());
      made.push_back({i});
    }
    return made;
  }

  /// Of the number of arrays and their types and shapes (FNV-1a); never 0.
  std::uint64_t digest() const {
    std::uint64_t hash = 0xCBF29CE484222325;
    const auto add = [&hash](std::uint64_t value) { hash = (hash ^ value) * 0x100000001B3; };
    add(arrays_.size());
    for (const Buffer& array : arrays_) {
      add(static_cast<std::uint64_t>(array.dtype));
      add(array.shape.dims);
      for (std::uint8_t dim = 0; dim < array.shape.dims; ++dim) add(array.shape.sizes[dim]);
    }
    return (hash ^ hash >> 48) << 16 >> 16 | 1;
  }

  bool are_all_above(std::size_t bytes) const {
    return std::ranges::all_of(arrays_, [bytes](const Buffer& array) { return array.bytes.size() > bytes; });
  }

  std::size_t elements(const std::vector<std::size_t>& part) const {
    return std::accumulate(part.begin(), part.end(), std::size_t{0}, [this](std::size_t sum, std::size_t i) {
      const Buffer& array = arrays_.at(i);
      return sum + array.bytes.size() / element_bytes(array.dtype);
    });
  }

  /// Those of `part` one after the other into the memory, or from there into them.
  void pack(const std::vector<std::size_t>& part, const py::object& memory) const {
    copy(part, memory, Access::kWrite,
         [](std::span<std::byte> array, std::span<std::byte> place) { copy_bytes(array, place); });
  }
  void unpack(const std::vector<std::size_t>& part, const py::object& memory) const {
    copy(part, memory, Access::kRead,
         [](std::span<std::byte> array, std::span<std::byte> place) { copy_bytes(place, array); });
  }

  std::size_t size() const { return arrays_.size(); }

 private:
  template <class Copy>
  void copy(const std::vector<std::size_t>& part, const py::object& memory, Access access, const Copy& each) const {
    Loan whole;
    whole.take(memory, access, "the bucket");
    std::span<std::byte> rest = whole.bytes;
    py::gil_scoped_release unlocked;
    for (const std::size_t i : part) {
      const std::span<std::byte> array = arrays_.at(i).bytes;
      if (array.size() > rest.size()) throw Error(Code::kInvalidArgument, "the bucket is too small for its arrays");
      each(array, rest.first(array.size()));
      rest = rest.subspan(array.size());
    }
  }

  std::vector<Buffer> arrays_;
};

}  // namespace

void bind_arrays(py::module_& module) {
  py::class_<PyArrays>(module, "Arrays")
      .def(py::init<const py::sequence&, bool>(), py::arg("arrays"), py::arg("writable") = false)
      .def("__len__", &PyArrays::size)
      .def("parts", &PyArrays::parts, py::arg("most_bytes"))
      .def("digest", &PyArrays::digest)
      .def("are_all_above", &PyArrays::are_all_above, py::arg("bytes"))
      .def("elements", &PyArrays::elements, py::arg("part"))
      .def("pack", &PyArrays::pack, py::arg("part"), py::arg("memory"))
      .def("unpack", &PyArrays::unpack, py::arg("part"), py::arg("memory"));
}

}  // namespace herring::python
