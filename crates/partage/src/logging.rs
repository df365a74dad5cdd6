//! Logging of all daemons: the filter, the formats and the writer.
//!
//! `PARTAGE_LOG`, or `RUST_LOG` if that is not set, filters by level and crate: `debug`, or `info,partage_agent=debug`.

use partage_enforce::error_chain::describe;
use std::env;
use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

/// The environment variable with the log filter.
const FILTER_VARIABLE: &str = "PARTAGE_LOG";
/// The environment variable that many Rust programs read. It may be meant for another program, so an invalid filter in it is ignored.
const FALLBACK_VARIABLE: &str = "RUST_LOG";
/// The environment variable that selects JSON for daemons that are started in the background.
const FORMAT_VARIABLE: &str = "PARTAGE_LOG_FORMAT";

/// Libraries that log every failed request as an error, without naming the request. They are silenced because the agent logs an
/// outage once, with its own operation.
const REQUEST_LIBRARIES: [&str; 5] = ["kube", "hyper", "tower", "h2", "tonic"];

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogFormat {
    /// Time, level, spans, message and fields.
    Text,
    /// One JSON object per line.
    Json,
    /// Message and fields only, for the lines below a live view.
    View,
}

/// Options of the log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogOptions {
    pub(crate) format: LogFormat,
    /// Whether debug messages are logged; has no effect if an environment variable sets the filter.
    pub(crate) verbose: bool,
    /// Whether lines are colored.
    pub(crate) colors: bool,
}

/// The log filter in the environment is invalid.
#[derive(Debug, thiserror::Error)]
#[error(
    "{FILTER_VARIABLE}={text:?} is not a log filter: use a level (error, warn, info, debug, trace), or levels by crate, such as \
     info,partage_agent=debug"
)]
pub(crate) struct FilterError {
    text: String,
    source: tracing_subscriber::filter::ParseError,
}

/// Installs the logger of this process. Fails if the filter in the environment is invalid.
pub(crate) fn init<W>(options: LogOptions, writer: W) -> Result<(), FilterError>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let filter = filter(options.verbose, |name| env::var(name).ok())?;
    install(filter, options, writer);
    Ok(())
}

/// Installs the logger of a background daemon, which must start even if the filter in the environment is invalid: the invalid filter is
/// logged and replaced by the default.
pub(crate) fn init_or_default<W>(options: LogOptions, writer: W)
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    match filter(options.verbose, |name| env::var(name).ok()) {
        Ok(filter) => install(filter, options, writer),
        Err(error) => {
            install(default_filter(options.verbose), options, writer);
            tracing::warn!(error = %describe(&error), "log filter ignored");
        }
    }
}

fn install<W>(filter: EnvFilter, options: LogOptions, writer: W)
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let layer =
        tracing_subscriber::fmt::layer().with_writer(writer).with_target(false).with_ansi(options.colors);
    let registry = tracing_subscriber::registry();
    match options.format {
        LogFormat::Text => registry.with(layer.with_filter(filter)).init(),
        LogFormat::Json => registry.with(layer.json().with_filter(filter)).init(),
        LogFormat::View => registry.with(layer.event_format(ViewFormat).with_filter(filter)).init(),
    }
}

/// Returns the format that the environment selects; text by default.
pub(crate) fn format_from_env() -> LogFormat {
    if env::var(FORMAT_VARIABLE).is_ok_and(|format| format == "json") {
        LogFormat::Json
    } else {
        LogFormat::Text
    }
}

/// Returns the filter of the environment, or the default.
fn filter(verbose: bool, variable: impl Fn(&str) -> Option<String>) -> Result<EnvFilter, FilterError> {
    let set = |name: &str| variable(name).filter(|text| !text.trim().is_empty());
    if let Some(text) = set(FILTER_VARIABLE) {
        return EnvFilter::builder().parse(&text).map_err(|source| FilterError { text, source });
    }
    let fallback = set(FALLBACK_VARIABLE).and_then(|text| EnvFilter::builder().parse(text).ok());
    Ok(fallback.unwrap_or_else(|| default_filter(verbose)))
}

/// Returns a filter for `info` or `debug` messages of this workspace's crates, and errors of libraries.
fn default_filter(verbose: bool) -> EnvFilter {
    let ours = if verbose { "debug" } else { "info" };
    let silent: String = REQUEST_LIBRARIES.iter().map(|library| format!(",{library}=off")).collect();
    // A target matches by prefix: this covers all `partage_*` crates.
    EnvFilter::new(format!("error,partage={ours}{silent}"))
}

/// Formats a line below a live view: `error: ` or `warning: ` by level, then the message and the fields.
struct ViewFormat;

impl<S, N> FormatEvent<S, N> for ViewFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        match *event.metadata().level() {
            Level::ERROR => writer.write_str("error: ")?,
            Level::WARN => writer.write_str("warning: ")?,
            _ => {}
        }
        context.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

/// A writer that passes each line to a function, without its line break.
#[derive(Clone)]
pub(crate) struct LineWriter(Arc<dyn Fn(&str) + Send + Sync>);

impl LineWriter {
    pub(crate) fn new(sink: impl Fn(&str) + Send + Sync + 'static) -> LineWriter {
        LineWriter(Arc::new(sink))
    }
}

impl Write for LineWriter {
    /// Splits the bytes into lines. The logger writes each event with one call, so no line arrives in parts.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for line in String::from_utf8_lossy(bytes).lines() {
            (self.0)(line);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn partage_log_takes_precedence_over_rust_log() {
        let of = |set: &[(&str, &str)], verbose: bool| {
            let set: Vec<(String, String)> =
                set.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect();
            filter(verbose, move |name| set.iter().find(|(is, _)| is == name).map(|(_, text)| text.clone()))
                .map(|filter| filter.to_string())
        };
        for (verbose, ours) in [(false, "partage=info"), (true, "partage=debug")] {
            let default = of(&[], verbose).unwrap();
            let directives: Vec<&str> = default.split(',').collect();
            for directive in [ours, "error", "kube=off", "tower=off"] {
                assert!(directives.contains(&directive), "{directive} is not in {default}");
            }
        }
        assert_eq!(of(&[("RUST_LOG", "warn")], true).unwrap(), "warn");
        assert_eq!(of(&[("RUST_LOG", "warn"), ("PARTAGE_LOG", "trace")], false).unwrap(), "trace");
        assert_eq!(of(&[("RUST_LOG", "warn"), ("PARTAGE_LOG", " ")], false).unwrap(), "warn");
        // An invalid RUST_LOG is ignored: it may be meant for another program.
        assert_eq!(of(&[("RUST_LOG", "partage=loud")], false).unwrap(), of(&[], false).unwrap());
        let error = of(&[("PARTAGE_LOG", "partage=loud")], false).unwrap_err();
        assert!(error.to_string().starts_with("PARTAGE_LOG=\"partage=loud\" is not a log filter"), "{error}");
    }

    /// Returns the lines that are logged in this format while `work` runs.
    fn logged(format: LogFormat, work: impl FnOnce()) -> Vec<String> {
        let (writer, lines) = recorded();
        let layer = tracing_subscriber::fmt::layer().with_writer(writer).with_target(false).with_ansi(false);
        let registry = tracing_subscriber::registry();
        match format {
            LogFormat::View => {
                tracing::subscriber::with_default(registry.with(layer.event_format(ViewFormat)), work);
            }
            LogFormat::Json => tracing::subscriber::with_default(registry.with(layer.json()), work),
            LogFormat::Text => tracing::subscriber::with_default(registry.with(layer.without_time()), work),
        }
        let lines = lines.lock().unwrap();
        lines.clone()
    }

    #[test]
    fn failed_requests_are_logged_by_the_agent_and_not_by_libraries() {
        let events = || {
            tracing::error!(target: "kube_client::client::builder", "kube");
            tracing::error!(target: "hyper_util::client", "hyper");
            tracing::error!(target: "tower::buffer::worker", "tower");
            tracing::error!(target: "tonic::transport", "tonic");
            tracing::error!(target: "rustls::conn", "rustls");
            tracing::warn!(target: "rustls::conn", "rustls warns");
            tracing::info!(target: "partage_agent::containers::gc", "agent");
            tracing::debug!(target: "partage_cluster::client", "cluster");
        };
        for (verbose, expected) in
            [(false, &["error: rustls", "agent"][..]), (true, &["error: rustls", "agent", "cluster"])]
        {
            let (writer, lines) = recorded();
            let layer = tracing_subscriber::fmt::layer().with_writer(writer).with_ansi(false);
            let layer = layer.event_format(ViewFormat).with_filter(filter(verbose, |_| None).unwrap());
            tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), events);
            assert_eq!(*lines.lock().unwrap(), expected);
        }
    }

    /// Returns a writer, and the lines that are written to it.
    fn recorded() -> (impl Fn() -> LineWriter, Arc<Mutex<Vec<String>>>) {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&lines);
        let writer = LineWriter::new(move |line| sink.lock().unwrap().push(line.to_string()));
        (move || writer.clone(), lines)
    }

    fn events() {
        let _span = tracing::info_span!("request", uid = 7).entered();
        tracing::info!(share = %"a", grant = %"4 GiB of GPU 0", "share granted");
        tracing::warn!(gpu = 1, "GPU unhealthy");
    }

    #[test]
    fn view_shows_messages_with_their_fields() {
        let expected = ["share granted share=a grant=4 GiB of GPU 0", "warning: GPU unhealthy gpu=1"];
        assert_eq!(logged(LogFormat::View, events), expected);
    }

    #[test]
    fn text_has_the_span_before_the_message() {
        let lines = logged(LogFormat::Text, events);
        assert_eq!(lines[0].trim_start(), "INFO request{uid=7}: share granted share=a grant=4 GiB of GPU 0");
    }

    #[test]
    fn json_has_the_fields_of_the_event_and_its_span() {
        let lines = logged(LogFormat::Json, events);
        let line: serde_json::Value = serde_json::from_str(&lines[1]).unwrap();
        assert_eq!((&line["level"], &line["fields"]["gpu"]), (&"WARN".into(), &1.into()));
        assert_eq!((&line["fields"]["message"], &line["span"]["uid"]), (&"GPU unhealthy".into(), &7.into()));
    }
}
