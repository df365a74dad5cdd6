//! The text for readers that do not ask for OpenMetrics: the same figures, named as they expect it.

/// OpenMetrics text in the form that was before it. There a counter's family is called as its samples are, nothing is an
/// info, and there are neither units nor an end.
pub(super) fn classic(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut help = None;
    for line in text.lines() {
        let Some(told) = line.strip_prefix("# ") else {
            out.push_str(line);
            out.push('\n');
            continue;
        };
        if told.starts_with("HELP ") {
            help = told.strip_prefix("HELP ").and_then(|rest| rest.split_once(' '));
        } else if let Some((name, kind)) = told.strip_prefix("TYPE ").and_then(|rest| rest.split_once(' ')) {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                kind => ("", kind),
            };
            if let Some((_, words)) = help.take() {
                out.push_str(&format!("# HELP {name}{suffix} {words}\n"));
            }
            out.push_str(&format!("# TYPE {name}{suffix} {kind}\n"));
        }
    }
    out
}
