//! The Prometheus text format, for clients that do not accept OpenMetrics.

/// Converts OpenMetrics text to the Prometheus text format. There a counter's family has the name of its samples, the type info
/// does not exist, and there are neither units nor an end marker.
pub(super) fn to_text_format(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut help = None;
    for line in text.lines() {
        let Some(comment) = line.strip_prefix("# ") else {
            out.push_str(line);
            out.push('\n');
            continue;
        };
        if comment.starts_with("HELP ") {
            help = comment.strip_prefix("HELP ").and_then(|rest| rest.split_once(' '));
        } else if let Some((name, kind)) = comment.strip_prefix("TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                kind => ("", kind),
            };
            if let Some((_, description)) = help.take() {
                out.push_str(&format!("# HELP {name}{suffix} {description}\n"));
            }
            out.push_str(&format!("# TYPE {name}{suffix} {kind}\n"));
        }
    }
    out
}
