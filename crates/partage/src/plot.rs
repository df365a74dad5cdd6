//! Plots allocation against arrived load as SVG.
//!
//! Hand-written: with plotters the module would be about 40 lines shorter and link three more crates for one option of one command.

use partage_core::replay::ReplayOutcome;
use std::fmt::Write;

/// Distance of the points at which runs are averaged, in percent of the cluster's capacity.
const LOAD_STEP: f64 = 0.5;
/// Colors that are distinguishable with color blindness (Okabe and Ito). The last is for the default policy.
const COLORS: [&str; 8] =
    ["#999999", "#56b4e9", "#e69f00", "#0072b2", "#cc79a7", "#f0e442", "#009e73", "#d55e00"];

/// The curve of one policy: arrived load and allocation, in percent of the cluster's capacity.
pub(crate) struct AllocationCurve {
    name: &'static str,
    points: Vec<(f64, f64)>,
}

/// Returns the points of one run, in percent of the cluster's capacity.
pub(crate) fn curve(outcome: &ReplayOutcome) -> Vec<(f64, f64)> {
    let percent = |cores: u64| cores as f64 * 100.0 / outcome.capacity_cores.max(1) as f64;
    outcome.curve.iter().map(|&(arrived, allocated)| (percent(arrived), percent(allocated))).collect()
}

impl AllocationCurve {
    /// Returns the mean of several runs, up to the load that all of them reached.
    pub(crate) fn mean(name: &'static str, curves: &[Vec<(f64, f64)>]) -> AllocationCurve {
        let ends = curves.iter().map(|curve| curve.last().map_or(0.0, |point| point.0));
        // Infinite if there are no runs: the curve then has only its origin.
        let reached = ends.fold(f64::INFINITY, f64::min);
        let mut points = vec![(0.0, 0.0)];
        let steps = if reached.is_finite() { (reached / LOAD_STEP) as usize } else { 0 };
        for step in 1..=steps {
            let load = step as f64 * LOAD_STEP;
            let sum: f64 = curves.iter().map(|curve| at(curve, load)).sum();
            points.push((load, sum / curves.len() as f64));
        }
        AllocationCurve { name, points }
    }
}

/// Returns the allocation at a load, interpolated linearly.
fn at(curve: &[(f64, f64)], load: f64) -> f64 {
    let after = curve.partition_point(|point| point.0 < load);
    let (x0, y0) = if after == 0 { (0.0, 0.0) } else { curve[after - 1] };
    let Some(&(x1, y1)) = curve.get(after) else { return y0 };
    if x1 > x0 { y0 + (y1 - y0) * (load - x0) / (x1 - x0) } else { y1 }
}

/// One panel of the plot, with its ranges of both axes.
struct PlotPanel {
    left: f64,
    load: (f64, f64),
    allocated: (f64, f64),
    title: &'static str,
}

const PANEL_TOP: f64 = 60.0;
const PANEL_WIDTH: f64 = 400.0;
const PANEL_HEIGHT: f64 = 320.0;

impl PlotPanel {
    fn x(&self, load: f64) -> f64 {
        self.left + (load - self.load.0) / (self.load.1 - self.load.0) * PANEL_WIDTH
    }

    fn y(&self, allocated: f64) -> f64 {
        PANEL_TOP + PANEL_HEIGHT
            - (allocated - self.allocated.0) / (self.allocated.1 - self.allocated.0) * PANEL_HEIGHT
    }

    fn draw(&self, lines: &[&AllocationCurve], svg: &mut String) {
        let (left, right, bottom) = (self.left, self.left + PANEL_WIDTH, PANEL_TOP + PANEL_HEIGHT);
        text(svg, left, PANEL_TOP - 8.0, "start", self.title);
        text(svg, left + PANEL_WIDTH / 2.0, bottom + 36.0, "middle", "arrived load, % of the cluster's GPUs");
        for allocated in ticks(self.allocated) {
            let y = self.y(allocated);
            let _ = write!(svg, "<path d=\"M{left:.1} {y:.1}H{right:.1}\" stroke=\"#ddd\"/>");
            text(svg, left - 6.0, y + 4.0, "end", &format!("{allocated:.0}"));
        }
        for load in ticks(self.load) {
            let x = self.x(load);
            let _ = write!(svg, "<path d=\"M{x:.1} {PANEL_TOP}V{bottom:.1}\" stroke=\"#ddd\"/>");
            text(svg, x, bottom + 18.0, "middle", &format!("{load:.0}"));
        }
        for (at, (line, color)) in lines.iter().zip(colors(lines.len())).enumerate() {
            // Counted from the default policy, which is last and always solid.
            let dash = dash(lines.len() - 1 - at);
            let inside = |&&(load, allocated): &&(f64, f64)| {
                (self.load.0..=self.load.1).contains(&load)
                    && (self.allocated.0..=self.allocated.1).contains(&allocated)
            };
            let mut path = String::new();
            for (index, (load, allocated)) in line.points.iter().filter(inside).enumerate() {
                let pen = if index == 0 { 'M' } else { 'L' };
                let _ = write!(path, "{pen}{:.1} {:.1}", self.x(*load), self.y(*allocated));
            }
            let _ =
                write!(svg, "<path d=\"{path}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"{dash}/>");
        }
    }
}

/// Returns at most eight round numbers within a range.
fn ticks((low, high): (f64, f64)) -> impl Iterator<Item = f64> {
    let step = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0]
        .into_iter()
        .find(|step| (high - low) / step <= 7.0)
        .unwrap_or(100.0);
    (0..)
        .map(move |n| ((low / step).ceil() + f64::from(n)) * step)
        .take_while(move |tick| *tick <= high + 1e-9)
}

/// Returns the dash style: every second curve is dashed, so that curves on top of each other are both visible.
fn dash(index: usize) -> &'static str {
    if index % 2 == 1 { " stroke-dasharray=\"7 4\"" } else { "" }
}

/// Returns colors such that the last curve, that of the default policy, has the last color.
fn colors(lines: usize) -> impl Iterator<Item = &'static str> {
    COLORS.iter().copied().cycle().skip(COLORS.len() - lines.min(COLORS.len()))
}

/// Returns the plot: the whole range in the left panel, and the end of it enlarged in the right one.
pub(crate) fn svg(workload: &str, lines: &[&AllocationCurve]) -> String {
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 960 480\" font-family=\"sans-serif\" font-size=\"12\"><rect width=\"960\" height=\"480\" fill=\"#fff\"/>",
    );
    text(&mut svg, 50.0, 26.0, "start", &format!("GPU allocated as pods arrive: {workload}"));
    let most = lines.iter().filter_map(|line| line.points.last()).map(|point| point.0).fold(1.0, f64::max);
    let ends = || lines.iter().filter_map(|line| line.points.last()).map(|point| point.1);
    let (low, high) = (ends().fold(100.0, f64::min), ends().fold(0.0, f64::max));
    let whole = PlotPanel { left: 50.0, load: (0.0, most), allocated: (0.0, 100.0), title: "% allocated" };
    // From slightly below the lowest end of a curve to slightly above the highest.
    let zoom = (((low - 6.0) / 5.0).floor() * 5.0, (((high + 1.0) / 5.0).ceil() * 5.0).min(100.0));
    let end =
        PlotPanel { left: 520.0, load: (most * 0.6, most), allocated: zoom, title: "% allocated at the end" };
    whole.draw(lines, &mut svg);
    end.draw(lines, &mut svg);
    for (index, (line, color)) in lines.iter().zip(colors(lines.len())).enumerate() {
        let x = 50.0 + 112.0 * index as f64;
        let dash = dash(lines.len() - 1 - index);
        let _ = write!(svg, "<path d=\"M{x:.1} 448h18\" stroke=\"{color}\" stroke-width=\"3\"{dash}/>");
        text(&mut svg, x + 22.0, 452.0, "start", line.name);
    }
    svg.push_str("</svg>\n");
    svg
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let escaped = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = write!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{escaped}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_curve_is_between_its_runs() {
        let flat = |height: f64| vec![(0.0, height), (2.0, height)];
        let line = AllocationCurve::mean("x", &[flat(10.0), flat(20.0)]);
        assert_eq!(line.points.last(), Some(&(2.0, 15.0)));
        assert_eq!(at(&[(0.0, 0.0), (10.0, 5.0)], 4.0), 2.0);
    }

    #[test]
    fn workload_name_is_escaped() {
        let line = AllocationCurve::mean("x", &[vec![(0.0, 0.0), (1.0, 1.0)]]);
        assert!(svg("a<b&c", &[&line]).contains("a&lt;b&amp;c"));
    }
}
