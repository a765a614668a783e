#include "collectives/row_exchange.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/core/buffer.h"
#include "bindings/core/py_runtime.h"
#include "bindings/core/work.h"

namespace herring::python {
namespace {

using collectives::RowExchange;
using collectives::RowsSpec;
using Splits = std::optional<std::vector<std::int64_t>>;

/// None: the rows are shared equally. Throws Error(kInvalidArgument).
std::vector<std::int64_t> checked_splits(const py::object& splits, std::int64_t rows, std::uint32_t size) {
  if (splits.is_none()) return collectives::checked_splits(std::nullopt, rows, size);
  std::vector<std::int64_t> values;
  try {
    values = py::cast<std::vector<std::int64_t>>(py::list(splits));
  } catch (const std::exception&) {
    PyErr_Clear();
    throw Error(Code::kInvalidArgument, "alltoall: splits are " + std::string(py::repr(splits)) +
                                            "; they must be whole numbers, one for each rank");
  }
  return collectives::checked_splits(values, rows, size);
}

/// The arrays that go, and what is told of them, until the last step has ended.
struct PyRowExchange {
  std::vector<Buffer> arrays;
  std::optional<RowExchange> exchange;
};

std::shared_ptr<PyRowExchange> make_exchange(const py::sequence& arrays, const Splits& splits,
                                             collectives::NamedCall call) {
  auto made = std::make_shared<PyRowExchange>();
  std::vector<RowsSpec> specs;
  for (const py::handle array : arrays) {
    Buffer& buffer = made->arrays.emplace_back();
    buffer.take(array, Access::kRead, "the array");
    specs.push_back({buffer.dtype, py::cast<std::vector<std::int64_t>>(array.attr("shape"))});
    if (specs.back().shape.empty()) specs.back().shape = {1};  // A scalar is a row.
  }
  made->exchange.emplace(std::move(call), std::move(specs), splits);
  return made;
}

std::unique_ptr<PyWork> tell(const std::shared_ptr<PyRowExchange>& self, const PyRuntime& runtime) {
  auto work = std::make_unique<PyWork>(self->exchange->tell(*runtime.owned.get()));
  work->arrays = {Holding(self)};
  return work;
}

std::vector<std::unique_ptr<PyWork>> move(const std::shared_ptr<PyRowExchange>& self, const PyRuntime& runtime,
                                          std::size_t number, const py::object& output) {
  Buffer target;
  target.take(output, Access::kWrite, "the output");
  RowExchange::Works works;
  {
    const auto job = runtime.owned.get();
    py::gil_scoped_release unlocked;
    works = self->exchange->move(*job, number, self->arrays.at(number).bytes, target.bytes);
  }
  std::vector<std::unique_ptr<PyWork>> started;
  for (std::shared_ptr<runtime::Work>& work : works) {
    started.push_back(std::make_unique<PyWork>(std::move(work)));
    started.back()->arrays = {Holding(self), Holding(target.owner)};
  }
  return started;
}

}  // namespace

void bind_row_exchange(py::module_& module) {
  py::class_<PyRowExchange, std::shared_ptr<PyRowExchange>>(module, "RowExchange")
      .def(py::init([](const py::sequence& arrays, const Splits& splits, std::uint32_t group,
                       std::vector<std::uint32_t> ranks, std::uint32_t index, std::string name, std::uint64_t use,
                       std::optional<double> timeout) {
             return make_exchange(
                 arrays, splits, {GroupId{group}, std::move(ranks), index, std::move(name), use, to_duration(timeout)});
           }),
           py::arg("arrays"), py::arg("splits"), py::kw_only(), py::arg("group"), py::arg("ranks"), py::arg("index"),
           py::arg("name"), py::arg("use"), py::arg("timeout"))
      .def("tell", &tell, py::arg("runtime"))
      .def(
          "counts", [](const PyRowExchange& self, std::size_t number) { return self.exchange->counts(number); },
          py::arg("number") = 0)
      .def("move", &move, py::arg("runtime"), py::arg("number"), py::arg("output"));
  module.def("checked_splits", &checked_splits, py::arg("splits"), py::arg("rows"), py::arg("size"));
  module.def("check_dims", &collectives::check_dims, py::arg("dims"));
  module.def("rows_of", &collectives::rows_of, py::arg("rows"), py::arg("size"), py::arg("index"));
  module.def("message_tag", &collectives::message_tag, py::arg("name"), py::arg("use"));
}

}  // namespace herring::python
