// The built-in page: the files of web/, compiled into the program.
#pragma once

#include <string_view>

namespace oscar::server {

std::string_view WebPage();    // index.html
std::string_view WebStyle();   // app.css
std::string_view WebScript();  // app.js

}  // namespace oscar::server
