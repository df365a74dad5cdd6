//! The tables of `partage top` and `partage up`: pure functions from reports to lines.

use super::super::format::{self, format_bytes, format_cores};
use super::rates::{ShareRate, UsageRates};
use crate::terminal::{StyledLine, TableColumn, TextStyle, layout_table};
use partage_core::model::Cores;
use partage_workstation::report::{GpuReport, GpuShareReport, MachineReport, ShareReport, ShareStage};
use std::cmp::Ordering;

/// The order of shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SortKey {
    /// Alphabetical order of share names.
    #[default]
    Name,
    /// Highest memory usage first.
    Memory,
    /// Highest compute usage first.
    Cores,
    /// Longest throttled time first.
    Throttled,
}

impl SortKey {
    fn name(self) -> &'static str {
        match self {
            SortKey::Name => "name",
            SortKey::Memory => "memory",
            SortKey::Cores => "cores",
            SortKey::Throttled => "throttled",
        }
    }
}

/// Options of the view; some are changed by keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ViewOptions {
    /// Maximum width of a line; `usize::MAX` is unlimited.
    pub(crate) width: usize,
    /// The order of shares.
    pub(crate) sort: SortKey,
    /// Whether the order is reversed.
    pub(crate) reverse: bool,
    /// Whether the terminal shows characters other than ASCII.
    pub(crate) unicode: bool,
    /// Whether the help for keys is shown.
    pub(crate) help: bool,
}

impl ViewOptions {
    pub(crate) fn new(width: usize, unicode: bool) -> ViewOptions {
        ViewOptions { width, sort: SortKey::default(), reverse: false, unicode, help: false }
    }

    /// Applies a key. Returns whether the key has a meaning.
    pub(crate) fn apply_key(&mut self, key: char) -> bool {
        match key.to_ascii_lowercase() {
            'm' => self.sort = SortKey::Memory,
            'c' => self.sort = SortKey::Cores,
            'n' => self.sort = SortKey::Name,
            't' => self.sort = SortKey::Throttled,
            'r' => self.reverse = !self.reverse,
            '?' | 'h' => self.help = !self.help,
            _ => return false,
        }
        true
    }

    fn mark<'a>(&self, block: &'a str, ascii: &'a str) -> &'a str {
        if self.unicode { block } else { ascii }
    }
}

/// Returns all lines: the header, GPUs, shares and queued requests.
pub(crate) fn lines(
    before: Option<&MachineReport>,
    now: &MachineReport,
    options: &ViewOptions,
) -> Vec<StyledLine> {
    let rates = UsageRates::between(before, now);
    let mut lines = vec![header(now)];
    for warning in &now.daemon.warnings {
        let mark = options.mark("⚠", "!");
        lines.push(StyledLine::new(TextStyle::Error, format_args!("{mark} {warning}")));
    }
    if options.help {
        lines.extend(key_help());
    }
    lines.push(StyledLine::default());
    lines.extend(gpu_table(now, &rates, options));
    lines.push(StyledLine::default());
    if now.shares.is_empty() {
        lines.push(StyledLine::new(TextStyle::Dim, format_args!("{}", format::NO_SHARES_HINT)));
    } else {
        lines.extend(share_table(now, &rates, options));
    }
    if !now.waiting.is_empty() {
        lines.push(StyledLine::default());
        lines.extend(format::waiting_lines(now));
    }
    lines
}

/// Returns the line below the tables on a terminal.
pub(crate) fn footer(options: &ViewOptions) -> StyledLine {
    let mut line = StyledLine::default();
    line.push(TextStyle::Dim, format_args!("q quit  ? keys  sorted by {}", options.sort.name()));
    line.push(TextStyle::Dim, format_args!("{}", if options.reverse { ", reversed" } else { "" }));
    line
}

fn header(now: &MachineReport) -> StyledLine {
    let mut line = StyledLine::default();
    let kind = if now.driver.simulated { "simulated driver" } else { "driver" };
    let waiting = match now.waiting.len() {
        0 => String::new(),
        count => format!(", {count} queued"),
    };
    let counted = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    line.push(TextStyle::Heading, format_args!("{}", now.machine));
    line.push(
        TextStyle::Plain,
        format_args!(
            ": {}, {}{waiting}, {kind} {}",
            counted(now.gpus.len(), "GPU"),
            counted(now.shares.len(), "share"),
            now.driver.version
        ),
    );
    line
}

fn key_help() -> Vec<StyledLine> {
    let keys = [
        ("m", "sort by memory usage"),
        ("c", "sort by compute usage"),
        ("n", "sort by name"),
        ("t", "sort by throttled time"),
        ("r", "reverse the order"),
        ("?", "show or hide this help"),
        ("q", "quit, also Esc and Ctrl-C"),
    ];
    let line = |(key, meaning): (&str, &str)| {
        let mut line = StyledLine::new(TextStyle::Heading, format_args!("  {key}  "));
        line.push(TextStyle::Plain, format_args!("{meaning}"));
        line
    };
    std::iter::once(StyledLine::default()).chain(keys.into_iter().map(line)).collect()
}

fn cell(text: impl std::fmt::Display) -> StyledLine {
    StyledLine::new(TextStyle::Plain, format_args!("{text}"))
}

/// Returns a bar of used and allocated fractions.
fn bar(used: f64, allocated: f64, cells: usize, style: TextStyle, options: &ViewOptions) -> StyledLine {
    let marks = |part: f64| (part.clamp(0.0, 1.0) * cells as f64).round() as usize;
    // Any usage shows at least one mark.
    let used_marks = if used > 0.0 { marks(used).max(1) } else { 0 };
    let allocated_marks = marks(allocated).max(used_marks);
    let mut line = StyledLine::default();
    let mut add = |style: TextStyle, mark: &str, times: usize| {
        for _ in 0..times {
            line.push(style, format_args!("{mark}"));
        }
    };
    add(style, options.mark("█", "#"), used_marks);
    add(TextStyle::Plain, options.mark("▒", "="), allocated_marks - used_marks);
    add(TextStyle::Dim, options.mark("·", "."), cells - allocated_marks);
    line
}

/// Returns the width of a bar on a terminal of this width.
fn bar_width(width: usize, narrow: usize, wide: usize) -> usize {
    if width < 100 { narrow } else { wide }
}

fn fraction(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

fn percent(rates: &UsageRates, value: f64) -> String {
    if rates.are_known() { format!("{value:.1} %") } else { "-".into() }
}

const GPU_COLUMNS: [TableColumn; 12] = [
    TableColumn::number("GPU", 0),
    TableColumn::text("MODEL", 5, 28),
    TableColumn::text("MEMORY", 1, usize::MAX),
    TableColumn::number("USED", 0),
    TableColumn::number("ALLOCATED", 3),
    TableColumn::number("TOTAL", 2),
    TableColumn::text("COMPUTE", 4, usize::MAX),
    TableColumn::number("UTIL", 0),
    TableColumn::number("GUARANTEED", 6),
    TableColumn::number("TEMP", 7),
    TableColumn::number("POWER", 8),
    TableColumn::text("HEALTH", 0, usize::MAX),
];

fn gpu_table(now: &MachineReport, rates: &UsageRates, options: &ViewOptions) -> Vec<StyledLine> {
    let row = |(gpu, used_percent): (&GpuReport, &f64)| {
        let total = gpu.memory_bytes.0;
        // Without data from the driver, the usage of shares is summed.
        let gpu_shares = now
            .shares
            .iter()
            .flat_map(|share| &share.gpu_shares)
            .filter(|gpu_share| gpu_share.uuid == gpu.uuid);
        let used = gpu
            .used_memory_bytes
            .map_or_else(|| gpu_shares.map(|gpu_share| gpu_share.used_bytes.0).sum(), |used| used.0);
        let allocated = gpu.granted_memory_bytes.0;
        let guaranteed =
            f64::from(gpu.guaranteed_cores.as_millipercent()) / f64::from(Cores::WHOLE.as_millipercent());
        let known = |value: Option<String>| cell(value.unwrap_or_else(|| "-".into()));
        vec![
            cell(gpu.index),
            cell(gpu.model.trim_start_matches("NVIDIA ")),
            bar(
                fraction(used, total),
                fraction(allocated, total),
                bar_width(options.width, 8, 16),
                TextStyle::Good,
                options,
            ),
            cell(format_bytes(used)),
            cell(format_bytes(allocated)),
            cell(format_bytes(total)),
            bar(used_percent / 100.0, guaranteed, bar_width(options.width, 8, 16), TextStyle::Good, options),
            cell(percent(rates, *used_percent)),
            cell(gpu.guaranteed_cores),
            known(gpu.temperature.map(|degrees| format!("{degrees} C"))),
            known(gpu.power_milliwatts.map(|power| format!("{} W", power.div_ceil(1000)))),
            health(gpu),
        ]
    };
    layout_table(&GPU_COLUMNS, now.gpus.iter().zip(&rates.gpus).map(row).collect(), options.width)
}

fn health(gpu: &GpuReport) -> StyledLine {
    let mut line = match &gpu.unhealthy {
        None => StyledLine::new(TextStyle::Good, format_args!("ok")),
        Some(why) => StyledLine::new(TextStyle::Error, format_args!("{why}")),
    };
    match gpu.unowned_processes.len() {
        0 => {}
        1 => line.push(TextStyle::Warning, format_args!(", 1 process without a share")),
        many => line.push(TextStyle::Warning, format_args!(", {many} processes without a share")),
    }
    line
}

const SHARE_COLUMNS: [TableColumn; 11] = [
    TableColumn::text("NAME", 0, 26),
    TableColumn::text("USER", 6, 12),
    TableColumn::number("GPU", 3),
    TableColumn::text("MEMORY", 5, usize::MAX),
    TableColumn::number("USED", 0),
    TableColumn::number("LIMIT", 2),
    TableColumn::number("UTIL", 0),
    TableColumn::number("GUARANTEED", 4),
    TableColumn::number("THROTTLED", 1),
    TableColumn::number("REFUSED", 7),
    TableColumn::text("NOTE", 8, usize::MAX),
];

fn share_table(now: &MachineReport, rates: &UsageRates, options: &ViewOptions) -> Vec<StyledLine> {
    let mut order: Vec<usize> = (0..now.shares.len()).collect();
    order.sort_by(|&a, &b| {
        let order = compare_shares(now, rates, options.sort, a, b)
            .then_with(|| now.shares[a].name.cmp(&now.shares[b].name));
        if options.reverse { order.reverse() } else { order }
    });
    let rows = order.into_iter().flat_map(|at| {
        let share = &now.shares[at];
        share
            .gpu_shares
            .iter()
            .zip(&rates.shares[at])
            .map(|(gpu_share, rate)| row(share, gpu_share, rate, rates, options))
    });
    layout_table(&SHARE_COLUMNS, rows.collect(), options.width)
}

/// Compares two shares by the sort key.
fn compare_shares(now: &MachineReport, rates: &UsageRates, sort: SortKey, a: usize, b: usize) -> Ordering {
    let memory = |at: usize| {
        now.shares[at].gpu_shares.iter().map(|gpu_share| u128::from(gpu_share.used_bytes.0)).sum::<u128>()
    };
    let sum = |at: usize, what: fn(&ShareRate) -> f64| rates.shares[at].iter().map(what).sum::<f64>();
    match sort {
        SortKey::Name => Ordering::Equal,
        SortKey::Memory => memory(b).cmp(&memory(a)),
        SortKey::Cores => sum(b, |rate| rate.used).total_cmp(&sum(a, |rate| rate.used)),
        SortKey::Throttled => sum(b, |rate| rate.throttled).total_cmp(&sum(a, |rate| rate.throttled)),
    }
}

fn row(
    share: &ShareReport,
    gpu_share: &GpuShareReport,
    rate: &ShareRate,
    rates: &UsageRates,
    options: &ViewOptions,
) -> Vec<StyledLine> {
    /// Fraction of the memory limit from which usage is highlighted: allocations may soon fail.
    const NEAR_LIMIT: f64 = 0.9;
    /// Percentage of throttled time from which it is highlighted; less is the normal effect of a limit.
    const HIGH_THROTTLED_PERCENT: f64 = 50.0;
    let of_limit = gpu_share.memory_bytes.map(|limit| fraction(gpu_share.used_bytes.0, limit.0));
    let full = of_limit.is_some_and(|used| used >= NEAR_LIMIT);
    let styled = |warn: bool, text: String| {
        StyledLine::new(if warn { TextStyle::Warning } else { TextStyle::Plain }, format_args!("{text}"))
    };
    let style = if full { TextStyle::Warning } else { TextStyle::Good };
    vec![
        name(share, options),
        cell(&share.user),
        cell(gpu_share.gpu),
        of_limit.map_or_else(StyledLine::default, |used| {
            bar(used, 0.0, bar_width(options.width, 6, 8), style, options)
        }),
        styled(full, format_bytes(gpu_share.used_bytes.0)),
        cell(gpu_share.memory_bytes.map_or_else(|| "-".into(), |limit| format_bytes(limit.0))),
        cell(percent(rates, rate.used)),
        cell(format_cores(gpu_share, options.mark("≤", "<="))),
        styled(rate.throttled >= HIGH_THROTTLED_PERCENT, percent(rates, rate.throttled)),
        styled(gpu_share.refusals > 0, gpu_share.refusals.to_string()),
        note(share),
    ]
}

/// Returns the name with the bypass warning, which is visible there on the narrowest terminal too.
fn name(share: &ShareReport, options: &ViewOptions) -> StyledLine {
    let mut line = cell(&share.name);
    if !share.bypass_suspected.is_empty() {
        line.cut(24);
        line.push(TextStyle::Error, format_args!(" {}", options.mark("⚠", "!")));
    }
    line
}

fn note(share: &ShareReport) -> StyledLine {
    let mut line = match share.stage {
        ShareStage::Running => StyledLine::default(),
        ShareStage::Starting => cell("starting"),
        ShareStage::Lingering => cell("lingering"),
        ShareStage::Stopping => StyledLine::new(TextStyle::Warning, format_args!("stopping")),
    };
    if !share.bypass_suspected.is_empty() {
        let gap = if line.width() > 0 { ", " } else { "" };
        line.push(TextStyle::Error, format_args!("{gap}bypass suspected: partage inspect {}", share.name));
    }
    line
}
