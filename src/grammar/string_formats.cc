#include "grammar/string_formats.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>

namespace oscar {
namespace {

// Left to the grammar library.
constexpr std::array<std::string_view, 4> kOfTheLibrary = {"ipv6", "uri-reference", "iri-reference",
                                                           "uri-template"};

// By the Gregorian calendar, years 0001 to 9999.
std::string Date() {
  constexpr const char* kYear = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)";
  constexpr const char* kLeapYear =
      "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)";
  return fmt::format(
      "({0}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|"
      "02-(0[1-9]|1[0-9]|2[0-8]))|{1}-02-29)",
      kYear, kLeapYear);
}

// RFC 3339, without leap seconds.
std::string Time() {
  return "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6}){0,1}"
         "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
}

// RFC 3339, appendix A.
std::string Duration() {
  constexpr const char* kNumber = "[0-9]{1,9}";
  const auto chain = [&](std::string_view units) {  // of units in order, none left out between two
    std::string all;
    for (size_t first = 0; first < units.size(); ++first) {
      std::string one;
      for (size_t i = units.size(); i-- > first;) {
        const std::string rest = one.empty() ? "" : fmt::format("({}){{0,1}}", one);
        one = fmt::format("{}{}{}", kNumber, units[i], rest);
      }
      all += (first == 0 ? "" : "|") + one;
    }
    return all;
  };
  return fmt::format("P(({0})(T({1})){{0,1}}|T({1})|{2}W)", chain("YMD"), chain("HMS"), kNumber);
}

std::string Ipv4() {
  constexpr const char* kByte = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9][0-9]|[0-9])";
  return fmt::format("({0}\\.){{3}}{0}", kByte);
}

// RFC 1123: labels of 61 characters, 247 together, where 63 and 253 are allowed. Never two hyphens
// in a row, which names of other scripts reserve.
std::string Hostname() {
  constexpr const char* kLabel = "[A-Za-z0-9](-{0,1}[A-Za-z0-9]){0,30}";
  return fmt::format("{0}(\\.{0}){{0,3}}", kLabel);
}

std::string Email() {
  constexpr const char* kLabel = "[A-Za-z0-9]+(-[A-Za-z0-9]+)*";
  return fmt::format("[A-Za-z0-9_+-]+(\\.[A-Za-z0-9_+-]+)*@{0}(\\.{0})+", kLabel);
}

// RFC 3986, without percent signs and addresses in brackets.
std::string Uri() {
  constexpr const char* kHead = "[A-Za-z0-9._~@!$&()*+,;=-]";
  constexpr const char* kPath = "[A-Za-z0-9._~:@!$&()*+,;=/-]*";
  constexpr const char* kTail = "[A-Za-z0-9._~:@!$&()*+,;=/?-]*";
  return fmt::format(
      "[A-Za-z][A-Za-z0-9+.-]*:(//[A-Za-z0-9._~-]+(:[0-9]{{1,5}}){{0,1}}(/{1}){{0,1}}|{0}{1})"
      "(\\?{2}){{0,1}}(#{2}){{0,1}}",
      kHead, kPath, kTail);
}

constexpr const char* kPointer = "(/([A-Za-z0-9 ._:@!$&()*+,;=?#%^|-]|~[01])*)*";

}  // namespace

std::optional<std::string> FormatPattern(std::string_view format) {
  if (format == "date") return Date();
  if (format == "time") return Time();
  if (format == "date-time") return fmt::format("{}T{}", Date(), Time());
  if (format == "duration") return Duration();
  if (format == "uuid") return "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}";
  if (format == "ipv4") return Ipv4();
  if (format == "hostname" || format == "idn-hostname") return Hostname();
  if (format == "email" || format == "idn-email") return Email();
  if (format == "uri" || format == "iri") return Uri();
  if (format == "json-pointer") return kPointer;
  if (format == "relative-json-pointer") return fmt::format("(0|[1-9][0-9]*)(#|{})", kPointer);
  return std::nullopt;
}

bool IsKnownFormat(std::string_view format) {
  return std::ranges::find(kOfTheLibrary, format) != kOfTheLibrary.end() ||
         FormatPattern(format).has_value();
}

}  // namespace oscar
