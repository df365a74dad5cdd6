//! A report as a picture: pure functions from what is known to lines.

use super::super::words::{cores, size};
use super::rates::{Rate, Rates};
use crate::screen::{Column, Line, Style, table};
use partage_workstation::report::{GpuReport, PartReport, Report, ShareReport, Stage};
use std::cmp::Ordering;

/// Who comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Sort {
    /// By name.
    #[default]
    Name,
    /// Who uses the most memory.
    Memory,
    /// Who got the most compute.
    Cores,
    /// Who was kept waiting the longest.
    Throttled,
}

impl Sort {
    fn words(self) -> &'static str {
        match self {
            Sort::Name => "name",
            Sort::Memory => "memory",
            Sort::Cores => "cores",
            Sort::Throttled => "throttled",
        }
    }
}

/// How to show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// Letters in a line; `usize::MAX` for as many as it takes.
    pub(crate) width: usize,
    /// Who comes first.
    pub(crate) sort: Sort,
    /// Who would come first comes last.
    pub(crate) reverse: bool,
    /// Whether more than ASCII can be shown.
    pub(crate) blocks: bool,
    /// Whether the keys are explained.
    pub(crate) help: bool,
}

impl Options {
    pub(crate) fn new(width: usize, blocks: bool) -> Options {
        Options { width, sort: Sort::default(), reverse: false, blocks, help: false }
    }

    /// Does what a key means; says whether it means anything.
    pub(crate) fn key(&mut self, key: char) -> bool {
        match key.to_ascii_lowercase() {
            'm' => self.sort = Sort::Memory,
            'c' => self.sort = Sort::Cores,
            'n' => self.sort = Sort::Name,
            't' => self.sort = Sort::Throttled,
            'r' => self.reverse = !self.reverse,
            '?' | 'h' => self.help = !self.help,
            _ => return false,
        }
        true
    }

    fn mark<'a>(&self, block: &'a str, ascii: &'a str) -> &'a str {
        if self.blocks { block } else { ascii }
    }
}

/// Everything, from the machine to who waits.
pub(crate) fn lines(before: Option<&Report>, now: &Report, options: &Options) -> Vec<Line> {
    let rates = Rates::between(before, now);
    let mut lines = vec![head(now)];
    for warning in &now.keeper.warnings {
        let mark = options.mark("⚠", "!");
        lines.push(Line::plain(Style::Bad, format_args!("{mark} {warning}")));
    }
    if options.help {
        lines.extend(keys());
    }
    lines.push(Line::default());
    lines.extend(gpus(now, &rates, options));
    lines.push(Line::default());
    if now.shares.is_empty() {
        lines.push(Line::plain(Style::Faint, format_args!("{}", super::super::words::NO_SHARES)));
    } else {
        lines.extend(shares(now, &rates, options));
    }
    if !now.waiting.is_empty() {
        lines.push(Line::default());
        lines.extend(super::super::words::waiting(now));
    }
    lines
}

/// What stands below it on a terminal.
pub(crate) fn foot(options: &Options) -> Line {
    let mut line = Line::default();
    line.push(Style::Faint, format_args!("q ends  ? keys  sorted by {}", options.sort.words()));
    line.push(Style::Faint, format_args!("{}", if options.reverse { ", reversed" } else { "" }));
    line
}

fn head(now: &Report) -> Line {
    let mut line = Line::default();
    let kind = if now.driver.simulated { "simulated driver" } else { "driver" };
    let waiting = match now.waiting.len() {
        0 => String::new(),
        1 => ", 1 waits".into(),
        many => format!(", {many} wait"),
    };
    let counted = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    line.push(Style::Head, format_args!("{}", now.machine));
    line.push(
        Style::Plain,
        format_args!(
            ": {}, {}{waiting}, {kind} {}",
            counted(now.gpus.len(), "GPU"),
            counted(now.shares.len(), "share"),
            now.driver.version
        ),
    );
    line
}

fn keys() -> Vec<Line> {
    let keys = [
        ("m", "sort by memory in use"),
        ("c", "sort by compute got"),
        ("n", "sort by name"),
        ("t", "sort by time kept waiting"),
        ("r", "the other way round"),
        ("?", "show or hide this"),
        ("q", "end; Esc and Ctrl-C too"),
    ];
    let line = |(key, means): (&str, &str)| {
        let mut line = Line::plain(Style::Head, format_args!("  {key}  "));
        line.push(Style::Plain, format_args!("{means}"));
        line
    };
    std::iter::once(Line::default()).chain(keys.into_iter().map(line)).collect()
}

fn cell(text: impl std::fmt::Display) -> Line {
    Line::plain(Style::Plain, format_args!("{text}"))
}

/// A bar: what is in use of what is promised of all of it.
fn bar(used: f64, promised: f64, cells: usize, style: Style, options: &Options) -> Line {
    let marks = |part: f64| (part.clamp(0.0, 1.0) * cells as f64).round() as usize;
    // What is there at all is seen.
    let used_marks = if used > 0.0 { marks(used).max(1) } else { 0 };
    let promised_marks = marks(promised).max(used_marks);
    let mut line = Line::default();
    let mut add = |style: Style, mark: &str, times: usize| {
        for _ in 0..times {
            line.push(style, format_args!("{mark}"));
        }
    };
    add(style, options.mark("█", "#"), used_marks);
    add(Style::Plain, options.mark("▒", "="), promised_marks - used_marks);
    add(Style::Faint, options.mark("·", "."), cells - promised_marks);
    line
}

/// Room for a bar, by the room for all.
fn cells(width: usize, narrow: usize, wide: usize) -> usize {
    if width < 100 { narrow } else { wide }
}

fn part_of(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

fn percent(rates: &Rates, value: f64) -> String {
    if rates.are_known() { format!("{value:.1} %") } else { "-".into() }
}

const GPU_COLUMNS: [Column; 12] = [
    Column::number("GPU", 0),
    Column::text("MODEL", 5, 28),
    Column::text("MEMORY", 1, usize::MAX),
    Column::number("USED", 0),
    Column::number("PROMISED", 3),
    Column::number("OF", 2),
    Column::text("COMPUTE", 4, usize::MAX),
    Column::number("GOT", 0),
    Column::number("PROMISED", 6),
    Column::number("TEMP", 7),
    Column::number("POWER", 8),
    Column::text("HEALTH", 0, usize::MAX),
];

fn gpus(now: &Report, rates: &Rates, options: &Options) -> Vec<Line> {
    let row = |(gpu, got): (&GpuReport, &f64)| {
        let total = gpu.memory_bytes.0;
        // What shares hold is known even where the driver is silent.
        let parts = now.shares.iter().flat_map(|share| &share.parts).filter(|part| part.uuid == gpu.uuid);
        let used =
            gpu.used_memory_bytes.map_or_else(|| parts.map(|part| part.used_bytes.0).sum(), |used| used.0);
        let promised = gpu.promised_memory_bytes.0;
        let promised_cores = f64::from(gpu.promised_cores.as_millipercent()) / 100_000.0;
        let known = |value: Option<String>| cell(value.unwrap_or_else(|| "-".into()));
        vec![
            cell(gpu.index),
            cell(gpu.model.trim_start_matches("NVIDIA ")),
            bar(
                part_of(used, total),
                part_of(promised, total),
                cells(options.width, 8, 16),
                Style::Good,
                options,
            ),
            cell(size(used)),
            cell(size(promised)),
            cell(size(total)),
            bar(got / 100.0, promised_cores, cells(options.width, 8, 16), Style::Good, options),
            cell(percent(rates, *got)),
            cell(gpu.promised_cores),
            known(gpu.temperature.map(|degrees| format!("{degrees} C"))),
            known(gpu.power_milliwatts.map(|power| format!("{} W", power.div_ceil(1000)))),
            health(gpu),
        ]
    };
    table(&GPU_COLUMNS, now.gpus.iter().zip(&rates.gpus).map(row).collect(), options.width)
}

fn health(gpu: &GpuReport) -> Line {
    let mut line = match &gpu.unhealthy {
        None => Line::plain(Style::Good, format_args!("ok")),
        Some(why) => Line::plain(Style::Bad, format_args!("{why}")),
    };
    match gpu.strangers.len() {
        0 => {}
        1 => line.push(Style::Warn, format_args!(", 1 process of no share")),
        many => line.push(Style::Warn, format_args!(", {many} processes of no share")),
    }
    line
}

const SHARE_COLUMNS: [Column; 11] = [
    Column::text("NAME", 0, 26),
    Column::text("USER", 6, 12),
    Column::number("GPU", 3),
    Column::text("MEMORY", 5, usize::MAX),
    Column::number("USED", 0),
    Column::number("LIMIT", 2),
    Column::number("GOT", 0),
    Column::number("PROMISED", 4),
    Column::number("THROTTLED", 1),
    Column::number("REFUSED", 7),
    Column::text("NOTE", 8, usize::MAX),
];

fn shares(now: &Report, rates: &Rates, options: &Options) -> Vec<Line> {
    let mut order: Vec<usize> = (0..now.shares.len()).collect();
    order.sort_by(|&a, &b| {
        let order =
            first(now, rates, options.sort, a, b).then_with(|| now.shares[a].name.cmp(&now.shares[b].name));
        if options.reverse { order.reverse() } else { order }
    });
    let rows = order.into_iter().flat_map(|at| {
        let share = &now.shares[at];
        share.parts.iter().zip(&rates.shares[at]).map(|(part, rate)| row(share, part, rate, rates, options))
    });
    table(&SHARE_COLUMNS, rows.collect(), options.width)
}

/// Which of two shares comes first.
fn first(now: &Report, rates: &Rates, sort: Sort, a: usize, b: usize) -> Ordering {
    let memory =
        |at: usize| now.shares[at].parts.iter().map(|part| u128::from(part.used_bytes.0)).sum::<u128>();
    let sum = |at: usize, what: fn(&Rate) -> f64| rates.shares[at].iter().map(what).sum::<f64>();
    match sort {
        Sort::Name => Ordering::Equal,
        Sort::Memory => memory(b).cmp(&memory(a)),
        Sort::Cores => sum(b, |rate| rate.got).total_cmp(&sum(a, |rate| rate.got)),
        Sort::Throttled => sum(b, |rate| rate.throttled).total_cmp(&sum(a, |rate| rate.throttled)),
    }
}

fn row(share: &ShareReport, part: &PartReport, rate: &Rate, rates: &Rates, options: &Options) -> Vec<Line> {
    /// A share that uses this much of its limit is about to be refused something.
    const NEARLY: f64 = 0.9;
    /// Waiting is what limits are for; this much of it is worth a look.
    const LONG: f64 = 50.0;
    let of_limit = part.memory_bytes.map(|limit| part_of(part.used_bytes.0, limit.0));
    let full = of_limit.is_some_and(|used| used >= NEARLY);
    let styled = |warn: bool, text: String| {
        Line::plain(if warn { Style::Warn } else { Style::Plain }, format_args!("{text}"))
    };
    let style = if full { Style::Warn } else { Style::Good };
    vec![
        name(share, options),
        cell(&share.user),
        cell(part.gpu),
        of_limit
            .map_or_else(Line::default, |used| bar(used, 0.0, cells(options.width, 6, 8), style, options)),
        styled(full, size(part.used_bytes.0)),
        cell(part.memory_bytes.map_or_else(|| "-".into(), |limit| size(limit.0))),
        cell(percent(rates, rate.got)),
        cell(cores(part, options.mark("≤", "<="))),
        styled(rate.throttled >= LONG, percent(rates, rate.throttled)),
        styled(part.refusals > 0, part.refusals.to_string()),
        note(share),
    ]
}

/// The warning stands beside the name, where it is seen on the narrowest terminal too.
fn name(share: &ShareReport, options: &Options) -> Line {
    let mut line = cell(&share.name);
    if !share.bypass_suspected.is_empty() {
        line.cut(24);
        line.push(Style::Bad, format_args!(" {}", options.mark("⚠", "!")));
    }
    line
}

fn note(share: &ShareReport) -> Line {
    let mut line = match share.stage {
        Stage::Running => Line::default(),
        Stage::Starting => cell("starting"),
        Stage::Lingering => cell("its command has ended"),
        Stage::Stopping => Line::plain(Style::Warn, format_args!("stopping")),
    };
    if !share.bypass_suspected.is_empty() {
        let gap = if line.width() > 0 { ", " } else { "" };
        line.push(Style::Bad, format_args!("{gap}bypass suspected: partage inspect {}", share.name));
    }
    line
}
