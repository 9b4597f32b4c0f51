#include "grammar/string_formats.h"

#include <gtest/gtest.h>

#include <regex>

namespace oscar {
namespace {

void Check(const char* format, std::initializer_list<const char*> right,
           std::initializer_list<const char*> wrong) {
  const auto pattern = FormatPattern(format);
  ASSERT_TRUE(pattern.has_value()) << format;
  const std::regex regex(*pattern);
  for (const char* text : right)
    EXPECT_TRUE(std::regex_match(text, regex)) << format << ' ' << text;
  for (const char* text : wrong)
    EXPECT_FALSE(std::regex_match(text, regex)) << format << ' ' << text;
}

TEST(StringFormats, DatesExist) {
  Check("date", {"2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31", "2023-04-30"},
        {"2023-02-29", "1900-02-29", "0000-01-01", "2023-04-31", "2023-13-01", "2023-00-10",
         "2023-01-00", "23-01-01", "0000-02-29", "2024-02-30"});
}

// Against the calendar, day by day over centuries that are leap years and that are not.
TEST(StringFormats, DatesAreThoseOfTheCalendar) {
  const std::regex regex(*FormatPattern("date"));
  for (int year : {1, 4, 99, 100, 400, 1000, 1900, 1999, 2000, 2023, 2024, 2100, 9996}) {
    const bool leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    for (int month = 0; month <= 13; ++month) {
      const int days = month == 2 ? (leap ? 29 : 28) : 30 + (month + month / 8) % 2;
      for (int day = 0; day <= 32; ++day) {
        char text[16];
        std::snprintf(text, sizeof(text), "%04d-%02d-%02d", year, month, day);
        const bool exists = month >= 1 && month <= 12 && day >= 1 && day <= days;
        EXPECT_EQ(std::regex_match(text, regex), exists) << text;
      }
    }
  }
}

TEST(StringFormats, Times) {
  Check("time", {"00:00:00Z", "23:59:59.123456+23:59"},
        {"24:00:00Z", "12:60:00Z", "12:00:60Z", "12:00:00", "12:00:00+24:00", "1:00:00Z"});
  Check("date-time", {"2024-02-29T00:00:00Z"}, {"2023-02-29T00:00:00Z", "2024-02-29 00:00:00Z"});
  Check("duration", {"P1Y", "P1Y2M3D", "P3D", "PT1H", "PT1H2M3S", "P1DT2M", "P4W", "P1M2DT3S"},
        {"P", "PT", "P1Y3D", "P1S", "P1H", "P1W2D", "1D", "PT1H3S", "P1YT"});
}

TEST(StringFormats, Addresses) {
  Check("ipv4", {"0.0.0.0", "255.255.255.255", "10.1.20.199"},
        {"01.2.3.4", "256.1.1.1", "1.2.3", "1.2.3.4.5", "000.1.1.1"});
  const std::string longest(31, 'a'), label(64, 'a');
  Check("hostname", {"a", "a-b.c", "localhost", longest.c_str(), "1.2"},
        {"", "-a", "a-", "a..b", "a.", label.c_str(), "a_b", "a--b"});
  Check("idn-hostname", {"a.b"}, {"-"});
  Check("email", {"a@b.c", "a.b+c@d-e.fg"}, {"a@b", "a@@b.c", ".a@b.c", "a@-b.c", "a\"@b.c"});
  Check("idn-email", {"a@b.c"}, {"a@b"});
  Check("uri", {"http://a.b:80/c?d#e", "mailto:a@b.c", "urn:x", "a://b"},
        {"a", "http://a:b/", "a:##", "1a:b", "a:", "a:<", "http://a b"});
  Check("iri", {"a:b"}, {"a"});
  Check("uuid", {"01234567-89ab-cdef-0123-456789abcdef"}, {"01234567-89ab-cdef-0123-456789abcdeg"});
}

TEST(StringFormats, Pointers) {
  Check("json-pointer", {"", "/", "/a/~0~1", "/a//b"}, {"a", "/~", "/~2", "/\""});
  Check("relative-json-pointer", {"0", "12#", "1/a"}, {"01", "#", "-1"});
}

TEST(StringFormats, OthersAreNotes) {
  for (const char* known : {"ipv6", "uri-reference", "iri-reference", "uri-template", "date"}) {
    EXPECT_TRUE(IsKnownFormat(known)) << known;
  }
  for (const char* other : {"", "int64", "password", "regex", "DATE"}) {
    EXPECT_FALSE(IsKnownFormat(other)) << other;
    EXPECT_FALSE(FormatPattern(other).has_value()) << other;
  }
}

}  // namespace
}  // namespace oscar
