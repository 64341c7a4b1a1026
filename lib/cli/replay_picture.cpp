// SPDX-License-Identifier: Apache-2.0
#include "lib/cli/replay.hpp"
#include "lib/support/format.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <string_view>

namespace evmm::cli {

namespace {

constexpr const char* k_reserved = "#dd8437";
constexpr const char* k_active = "#718096";
constexpr const char* k_allocated = "#2b6cb0";
constexpr const char* k_grid = "#e2e8f0";

// A panel: the plot, the sizes to its left, the title above, the events below, the legend right.
constexpr double k_left = 90;
constexpr double k_top = 40;
constexpr double k_plot_width = 780;
constexpr double k_plot_height = 240;
constexpr double k_panel_height = k_top + k_plot_height + 44;
constexpr double k_width = k_left + k_plot_width + 190;

using member = std::int64_t replay_curve::point::*;

std::string escaped(std::string_view words) {
  std::string text;
  for (const char c : words) {
    if (c == '<') {
      text += "&lt;";
    } else if (c == '&') {
      text += "&amp;";
    } else {
      text += c;
    }
  }
  return text;
}

std::int64_t peak(const replay_curve& curve, member which) {
  std::int64_t most = 0;
  for (const auto& each : curve.points) most = std::max(most, each.*which);
  return most;
}

std::string size_text(std::int64_t bytes) {
  return format_bytes(static_cast<std::size_t>(bytes));
}

/// 1, 2 or 5 times a power of ten, so that `most` has at most `steps` of them.
double round_step(double most, int steps) {
  const double least = std::max(most / steps, 1.0);
  const double power = std::pow(10, std::floor(std::log10(least)));
  for (const double times : {1.0, 2.0, 5.0}) {
    if (times * power >= least) return times * power;
  }
  return 10 * power;
}

class panel {
 public:
  panel(const replay_curve& curve, double y)
      : curve_(curve),
        y_(y + k_top),
        top_(std::max({peak(curve, &replay_curve::point::reserved),
                       peak(curve, &replay_curve::point::active), std::int64_t{1}})) {}

  std::string make() {
    const auto reserved = peak(curve_, &replay_curve::point::reserved);
    const auto allocated = peak(curve_, &replay_curve::point::allocated);
    text(k_left, y_ - 14,
         fmt::format("{}: {} events{}", std::filesystem::path(curve_.trace).filename().string(),
                     curve_.events,
                     allocated == 0 ? ""
                                    : fmt::format(", peak reserved / peak allocated {:.4f}",
                                                  static_cast<double>(reserved) /
                                                      static_cast<double>(allocated))),
         R"(font-size="14" font-weight="bold")");
    grid();
    line(&replay_curve::point::reserved, R"(fill="#dd8437" fill-opacity="0.15")", k_reserved);
    line(&replay_curve::point::active, R"(fill="none" stroke-dasharray="4 2")", k_active);
    line(&replay_curve::point::allocated, R"(fill="#2b6cb0" fill-opacity="0.15")", k_allocated);
    legend("reserved", k_reserved, &replay_curve::point::reserved, 0);
    legend("active", k_active, &replay_curve::point::active, 1);
    legend("allocated", k_allocated, &replay_curve::point::allocated, 2);
    return std::move(made_);
  }

 private:
  double x_of(double event) const {
    return k_left +
           k_plot_width * event / static_cast<double>(std::max<std::size_t>(curve_.events, 1));
  }
  double y_of(double bytes) const {
    return y_ + k_plot_height * (1 - bytes / (1.05 * static_cast<double>(top_)));
  }

  void grid() {
    // Sizes read best in powers of two.
    const auto step = std::bit_ceil(static_cast<std::uint64_t>(top_) / 6 + 1);
    for (std::uint64_t at = 0; at <= static_cast<std::uint64_t>(top_); at += step) {
      const double y = y_of(static_cast<double>(at));
      rule(k_left, y, k_left + k_plot_width, y);
      text(k_left - 8, y + 4, format_bytes(at), R"(text-anchor="end")");
    }
    const double events = round_step(static_cast<double>(curve_.events), 8);
    const auto last = static_cast<int>(static_cast<double>(curve_.events) / events);
    for (int i = 0; i <= last; ++i) {
      const double at = events * i;
      rule(x_of(at), y_, x_of(at), y_ + k_plot_height);
      text(x_of(at), y_ + k_plot_height + 18, fmt::format("{:.0f}", at), R"(text-anchor="middle")");
    }
  }

  /// Steps: a point holds for all of its events.
  void line(member which, std::string_view style, const char* colour) {
    std::string path = fmt::format("M{:.1f},{:.1f}", x_of(0), y_of(0));
    for (std::size_t i = 0; i < curve_.points.size(); ++i) {
      const double y = y_of(static_cast<double>(curve_.points[i].*which));
      const std::size_t end = std::min((i + 1) * curve_.events_a_point, curve_.events);
      path += fmt::format("V{:.1f}H{:.1f}", y, x_of(static_cast<double>(end)));
    }
    path += fmt::format("V{:.1f}", y_of(0));
    made_ += fmt::format("<path d=\"{}\" stroke=\"{}\" {}/>\n", path, colour, style);
  }

  void legend(std::string_view name, const char* colour, member which, int row) {
    const double x = k_left + k_plot_width + 16;
    const double y = y_ + 12 + 38 * row;
    made_ += fmt::format(R"(<rect x="{:.1f}" y="{:.1f}" width="14" height="10" fill="{}"/>)"
                         "\n",
                         x, y - 9, colour);
    text(x + 20, y, name);
    text(x + 20, y + 15, fmt::format("peak {}", size_text(peak(curve_, which))),
         R"(fill="#718096")");
  }

  void rule(double x1, double y1, double x2, double y2) {
    made_ += fmt::format(R"(<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" stroke="{}"/>)"
                         "\n",
                         x1, y1, x2, y2, k_grid);
  }
  void text(double x, double y, std::string_view words, std::string_view more = "") {
    made_ +=
        fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, more, escaped(words));
  }

  const replay_curve& curve_;
  const double y_;
  const std::int64_t top_;
  std::string made_;
};

}  // namespace

std::string draw(const std::vector<replay_curve>& curves) {
  std::string panels;
  double y = 0;
  for (const replay_curve& each : curves) {
    panels += panel(each, y).make();
    y += k_panel_height;
  }
  return fmt::format(R"(<svg xmlns="http://www.w3.org/2000/svg" width="{0:.0f}" height="{1:.0f}" )"
                     R"(viewBox="0 0 {0:.0f} {1:.0f}" font-family="Helvetica, Arial, sans-serif" )"
                     R"(font-size="12" fill="#1a202c">)"
                     "\n"
                     R"(<rect width="{0:.0f}" height="{1:.0f}" fill="#ffffff"/>)"
                     "\n{2}</svg>\n",
                     k_width, std::max(y, k_panel_height), panels);
}

}  // namespace evmm::cli
