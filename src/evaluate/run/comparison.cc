#include "run/comparison.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "backend/error_budgets.h"

namespace oscar {
namespace {

std::optional<double> MarginAt(const ItemRecord& record, int64_t token) {
  for (const TokenMargin& m : record.margins) {
    if (m.token == token) return m.margin;
  }
  return std::nullopt;
}

std::map<ItemKey, const ItemRecord*> ByKey(const std::vector<ItemRecord>& records) {
  std::map<ItemKey, const ItemRecord*> out;
  for (const ItemRecord& record : records) {
    if (record.strict.has_value()) out[KeyOf(record)] = &record;
  }
  return out;
}

std::string MarginText(const std::optional<double>& margin) {
  return margin.has_value() ? fmt::format("{:+.3f}", *margin) : "-";
}

}  // namespace

std::optional<double> Parting::Distance() const {
  if (!margin[0].has_value() || !margin[1].has_value()) return std::nullopt;
  return std::fabs(*margin[0] - *margin[1]);
}

Comparison CompareRuns(const std::vector<ItemRecord>& first,
                       const std::vector<ItemRecord>& second) {
  Comparison out;
  const auto a = ByKey(first), b = ByKey(second);
  for (const auto& [key, record] : b) out.unmatched += a.contains(key) ? 0 : 1;
  for (const auto& [key, one] : a) {
    const auto found = b.find(key);
    if (found == b.end()) {
      ++out.unmatched;
      continue;
    }
    const ItemRecord* const records[2] = {one, found->second};
    if (out.tasks.empty() || out.tasks.back().method != one->method ||
        out.tasks.back().task != one->task) {
      TaskComparison next;
      next.method = one->method;
      next.task = one->task;
      out.tasks.push_back(std::move(next));
    }
    TaskComparison& task = out.tasks.back();
    ++task.items;
    for (int i = 0; i < 2; ++i) task.strict[i] += *records[i]->strict ? 1 : 0;
    if (records[0]->first_wrong == records[1]->first_wrong) continue;
    ++task.diverged;
    Parting parting;
    parting.method = one->method;
    parting.task = one->task;
    parting.id = one->id;
    // -1, no wrong token, is the largest as an unsigned number.
    parting.token = static_cast<int64_t>(std::min(static_cast<uint64_t>(records[0]->first_wrong),
                                                  static_cast<uint64_t>(records[1]->first_wrong)));
    for (int i = 0; i < 2; ++i) {
      parting.strict[i] = *records[i]->strict;
      parting.margin[i] = MarginAt(*records[i], parting.token);
    }
    out.partings.push_back(std::move(parting));
  }
  return out;
}

std::string ComparisonToTable(const Comparison& comparison) {
  std::string out = fmt::format("{:<24} {:<14} {:>6} {:>8} {:>8} {:>7}\n", "method", "task",
                                "items", "strict", "against", "diverged");
  std::map<std::string, TaskComparison> totals;
  for (const TaskComparison& task : comparison.tasks) {
    out += fmt::format("{:<24} {:<14} {:>6} {:>8} {:>8} {:>7}\n", task.method, task.task,
                       task.items, task.strict[0], task.strict[1], task.diverged);
    TaskComparison& total = totals[task.method];
    total.items += task.items;
    total.diverged += task.diverged;
    for (int i = 0; i < 2; ++i) total.strict[i] += task.strict[i];
  }
  for (const auto& [method, total] : totals) {
    out += fmt::format("{:<24} {:<14} {:>6} {:>8} {:>8} {:>7}\n", method, "all", total.items,
                       total.strict[0], total.strict[1], total.diverged);
  }
  if (!comparison.partings.empty()) {
    out += fmt::format("\n{:<24} {:<18} {:>6} {:>14} {:>8} {:>8} {:>8}\n", "method", "item",
                       "token", "strict", "margin", "against", "apart");
  }
  std::map<std::string, double> widest;
  for (const Parting& p : comparison.partings) {
    const auto hit = [](bool strict) { return strict ? "hit" : "miss"; };
    out += fmt::format("{:<24} {:<18} {:>6} {:>14} {:>8} {:>8} {:>8}\n", p.method, p.id, p.token,
                       fmt::format("{} / {}", hit(p.strict[0]), hit(p.strict[1])),
                       MarginText(p.margin[0]), MarginText(p.margin[1]),
                       p.Distance().has_value() ? fmt::format("{:.3f}", *p.Distance()) : "-");
    double& width = widest[p.method];
    width = std::max(width, p.Distance().value_or(width));
  }
  if (!totals.empty()) out += "\n";
  for (const auto& [method, total] : totals) {
    const double budget = BudgetOf(method.substr(0, method.find('@'))).diverged;
    out += fmt::format("{}: {} of {} items diverged", method, total.diverged, total.items);
    if (budget < 1.0) {
      out += fmt::format(
          " ({:.1f} %; two correct programs may on {:.0f} %)",
          100.0 * static_cast<double>(total.diverged) / static_cast<double>(total.items),
          100.0 * budget);
    }
    if (widest.contains(method)) {
      out += fmt::format(", margins there at most {:.3f} apart", widest[method]);
    }
    out += "\n";
  }
  if (comparison.unmatched > 0) {
    out += fmt::format("{} items are in one of the runs alone\n", comparison.unmatched);
  }
  return out;
}

}  // namespace oscar
