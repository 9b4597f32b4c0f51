// The built-in page, web/index.html, compiled into the program.
#pragma once

#include <string_view>

namespace oscar::server {

std::string_view WebPage();

}  // namespace oscar::server
