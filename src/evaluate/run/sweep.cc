#include "run/sweep.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>

#include "quant/kv_method.h"
#include "report/charts.h"

namespace oscar {
namespace {

bool IsCalibration(const std::string& axis) { return axis == kSweepTokens || axis == kSweepText; }

Result<bool> Concerns(const SweepAxis& axis, const EvalMethod& method) {
  OSCAR_ASSIGN_OR_RETURN(const KvMethodInfo info, FindKvMethod(method.kv));
  if (IsCalibration(axis.name)) return info.takes_rotation && method.rotation.empty();
  if (axis.name == "bits") return info.takes_bits && !method.bits.has_value();
  return method.kv != "bf16";
}

void Set(const std::string& axis, const std::string& value, EvalMethod& method) {
  if (axis == "sink") method.sink = std::atoi(value.c_str());
  if (axis == "recent") method.recent = std::atoi(value.c_str());
  if (axis == "group") method.group_dims = std::atoi(value.c_str());
  if (axis == "bits") method.bits = std::strtod(value.c_str(), nullptr);
  method.label += fmt::format(" {}={}", axis, value);
  method.swept[axis] = value;
}

// What a chart of a sweep shows of a method.
struct Shown {
  std::string file, label;
  double (*value)(const MethodScore& method, const EvalResults& results);
  ScoreInterval (*interval)(const MethodScore& method, const EvalResults& results);
};

bool HasLong(const EvalResults& results) {
  return std::ranges::any_of(results.methods, [&](const MethodScore& method) {
    return method.MeanStrict(results.short_tasks).has_value();
  });
}

double ScoreOf(const MethodScore& method, const EvalResults& results) {
  const std::optional<double> strict =
      HasLong(results) ? method.MeanStrict(results.short_tasks) : method.MeanStrict();
  return strict.has_value() ? *strict : method.MeanAnswer().value_or(NAN);
}

ScoreInterval ScoreIntervalOf(const MethodScore& method, const EvalResults& results) {
  if (HasLong(results)) return method.StrictInterval(results.short_tasks);
  return method.MeanStrict().has_value() ? method.StrictInterval() : method.AnswerInterval();
}

double KlOf(const MethodScore& method, const EvalResults& results) {
  const auto score =
      method.MeanReference(HasLong(results) ? results.short_tasks : std::vector<std::string>());
  return score.has_value() && score->kl.has_value() ? 1000 * *score->kl : NAN;
}

const Shown kShown[] = {
    {"score", "mean score, %", ScoreOf, ScoreIntervalOf},
    // Values are a few thousandths, and differ by decades: maps have a scale for that.
    {"kl", "KL to BF16, nats per 1,000 tokens", KlOf, nullptr},
};

const MethodScore* PointOf(const EvalResults& results, const std::string& base,
                           const std::map<std::string, std::string>& place) {
  const auto found = std::ranges::find_if(results.methods, [&](const MethodScore& method) {
    return method.base == base && method.swept == place;
  });
  return found == results.methods.end() ? nullptr : &*found;
}

// A row of points as their values; `is_known` where there is any.
std::vector<double> ValuesOf(const EvalResults& results, const std::string& base,
                             std::map<std::string, std::string> place, const SweepAxis& axis,
                             const Shown& shown, bool& is_known) {
  std::vector<double> values;
  for (const std::string& value : axis.values) {
    place[axis.name] = value;
    const MethodScore* const point = PointOf(results, base, place);
    values.push_back(point == nullptr ? NAN : shown.value(*point, results));
    is_known |= std::isfinite(values.back());
  }
  return values;
}

std::string Map(const std::string& title, const std::vector<std::string>& rows,
                const SweepAxis& across, const std::vector<std::vector<double>>& values) {
  ChartOptions options;
  options.title = title;
  options.x.label = across.name;
  options.width = std::max(100 + 8 * static_cast<int>(title.size()),
                           150 + 90 * static_cast<int>(across.values.size()));
  options.digits = 3;
  return HeatMap(rows, across.values, values, options);
}

std::string Grid(const EvalResults& results, const std::string& base, const Shown& shown) {
  const SweepAxis &down = results.sweep[0], &across = results.sweep[1];
  std::vector<std::string> rows;
  std::vector<std::vector<double>> values;
  bool is_known = false;
  for (const std::string& y : down.values) {
    rows.push_back(fmt::format("{} {}", down.name == kSweepText ? "" : down.name, y));
    values.push_back(ValuesOf(results, base, {{down.name, y}}, across, shown, is_known));
  }
  return is_known ? Map(fmt::format("{}: {}", base, shown.label), rows, across, values) : "";
}

// One axis: methods side by side, as bars where they have intervals.
std::string Row(const EvalResults& results, const std::vector<std::string>& bases,
                const Shown& shown) {
  const SweepAxis& axis = results.sweep[0];
  std::vector<ChartBars> series;
  std::vector<std::vector<double>> values;
  bool is_known = false;
  for (const std::string& base : bases) {
    values.push_back(ValuesOf(results, base, {}, axis, shown, is_known));
    ChartBars& bars = series.emplace_back(ChartBars{base, values.back(), {}, {}, -1});
    bars.color = kPlainColor + static_cast<int>(series.size()) - 1;
    for (const std::string& value : axis.values) {
      const MethodScore* const point = PointOf(results, base, {{axis.name, value}});
      const ScoreInterval interval = point == nullptr || shown.interval == nullptr
                                         ? ScoreInterval()
                                         : shown.interval(*point, results);
      bars.low.push_back(interval.low), bars.high.push_back(interval.high);
    }
  }
  if (!is_known) return {};
  if (shown.interval == nullptr) return Map(shown.label, bases, axis, values);
  ChartOptions options;
  options.title = fmt::format("{}, by {}", shown.label, axis.name);
  options.y.label = shown.label;
  options.y.low = 0;
  options.height = 300;
  return BarChart(axis.values, series, options);
}

}  // namespace

Result<std::vector<SweepAxis>> ParseSweep(const std::vector<std::string>& texts) {
  std::vector<SweepAxis> axes;
  for (const std::string& text : texts) {
    const size_t equals = text.find('=');
    SweepAxis axis{text.substr(0, equals), {}};
    const bool is_text = axis.name == kSweepText;
    static const std::set<std::string> kNames = {"sink", "recent",     "group",
                                                 "bits", kSweepTokens, kSweepText};
    if (!kNames.contains(axis.name)) {
      return Unexpected(InvalidArgument(fmt::format(
          "--sweep {}: what is varied is sink, recent, group, bits, {} or {}, as in sink=0,64",
          text, kSweepTokens, kSweepText)));
    }
    const std::string list = equals == std::string::npos ? "" : text.substr(equals + 1);
    for (size_t at = 0; at <= list.size();) {
      const size_t end = std::min(list.find(',', at), list.size());
      const std::string value = list.substr(at, end - at);
      at = end + 1;
      char* stop = nullptr;
      const double number = std::strtod(value.c_str(), &stop);
      const bool is_whole = number == std::floor(number);
      if (value.empty() || (!is_text && (*stop != '\0' || !(number >= 0 && number <= 1e8) ||
                                         (axis.name != "bits" && !is_whole)))) {
        return Unexpected(InvalidArgument(
            fmt::format("--sweep {}: \"{}\" is no {}", text, value, is_text ? "text" : "number")));
      }
      if (std::ranges::find(axis.values, value) != axis.values.end()) {
        return Unexpected(
            InvalidArgument(fmt::format("--sweep {}: {} is there twice", text, value)));
      }
      axis.values.push_back(value);
    }
    if (std::ranges::find(axes, axis.name, &SweepAxis::name) != axes.end()) {
      return Unexpected(InvalidArgument(
          fmt::format("--sweep {}: {} is varied already; join its values", text, axis.name)));
    }
    axes.push_back(std::move(axis));
  }
  if (axes.size() > kMaxSweepAxes) {
    return Unexpected(InvalidArgument(
        fmt::format("--sweep: {} axes; at most {} fit a picture", axes.size(), kMaxSweepAxes)));
  }
  size_t points = 1;
  for (const SweepAxis& axis : axes) points *= axis.values.size();
  if (points > kMaxSweepPoints) {
    return Unexpected(InvalidArgument(
        fmt::format("--sweep: {} points per method; at most {}", points, kMaxSweepPoints)));
  }
  return axes;
}

Result<std::vector<EvalMethod>> ExpandSweep(const std::vector<EvalMethod>& methods,
                                            const std::vector<SweepAxis>& axes) {
  std::vector<EvalMethod> out;
  std::set<std::string> used;
  for (const EvalMethod& method : methods) {
    std::vector<EvalMethod> points = {method};
    points.front().base = method.label;
    for (const SweepAxis& axis : axes) {
      OSCAR_ASSIGN_OR_RETURN(const bool concerns, Concerns(axis, method));
      if (!concerns) continue;
      used.insert(axis.name);
      std::vector<EvalMethod> next;
      for (const EvalMethod& point : points) {
        for (const std::string& value : axis.values) {
          next.push_back(point);
          Set(axis.name, value, next.back());
        }
      }
      points = std::move(next);
    }
    out.insert(out.end(), points.begin(), points.end());
  }
  for (const SweepAxis& axis : axes) {
    if (used.contains(axis.name)) continue;
    return Unexpected(InvalidArgument(
        fmt::format("--sweep {}: none of the methods of --kv has a use for it", axis.name)));
  }
  return out;
}

std::vector<std::pair<std::string, std::string>> SweepCharts(const EvalResults& results) {
  std::vector<std::pair<std::string, std::string>> out;
  if (results.sweep.empty()) return out;
  std::vector<std::string> bases;
  for (const MethodScore& method : results.methods) {
    if (method.swept.size() != results.sweep.size()) continue;
    if (std::ranges::find(bases, method.base) == bases.end()) bases.push_back(method.base);
  }
  const auto add = [&](const std::string& name, std::string chart) {
    if (!chart.empty()) out.emplace_back(name, std::move(chart));
  };
  for (const Shown& shown : kShown) {
    if (results.sweep.size() == 1) {
      add(fmt::format("sweep-{}.svg", shown.file), Row(results, bases, shown));
      continue;
    }
    for (const std::string& base : bases) {
      std::string name = base;  // a rotation's path may be in it
      std::ranges::replace(name, '/', '_');
      add(fmt::format("sweep-{}-{}.svg", name, shown.file), Grid(results, base, shown));
    }
  }
  return out;
}

}  // namespace oscar
