//! Trace files: nodes and pods as CSV, with columns identified by the names in the header.

use crate::model::{
    Ask, Bytes, Constraints, ContainerRole, Cores, CoresAsk, Gpu, MemoryAsk, MilliCpu, Node, PodAsk,
    Selector, ShareAsk, TurnPreferences, WantedGpus,
};

/// Memory of a GPU in MiB. Traces measure a share in thousandths of a GPU, and a share has as many MiB.
const GPU_MIB: u64 = 1000;
/// Compute of a thousandth of a GPU, the unit of a trace, in thousandths of a percent.
const CORES_PER_TRACE_UNIT: u32 = Cores::WHOLE.as_millipercent() / TRACE_UNITS_PER_GPU;
/// Units of compute in one GPU, as traces count them.
const TRACE_UNITS_PER_GPU: u32 = 1000;
/// Maximum number of GPUs of a node or pod in a trace.
const MAX_GPUS: u32 = crate::model::MAX_GPUS_PER_NODE as u32;

/// A node as a trace describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceNode {
    /// Name as in the trace.
    pub name: String,
    /// CPU of the host.
    pub cpu: MilliCpu,
    /// Memory of the host.
    pub memory: Bytes,
    /// Number of GPUs of the node.
    pub gpus: u32,
    /// Model of all GPUs of the node.
    pub model: String,
}

/// A pod as a trace describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracePod {
    /// Name as in the trace.
    pub name: String,
    /// CPU of the host.
    pub cpu: MilliCpu,
    /// Memory of the host.
    pub memory: Bytes,
    /// Number of GPUs; 0 for none.
    pub gpus: u32,
    /// Compute requested of each GPU; [`Cores::WHOLE`] for whole GPUs.
    pub cores: Cores,
    /// GPU models that the pod may run on; empty for any.
    pub models: Vec<String>,
}

impl TraceNode {
    /// Converts to a node that the allocator understands.
    pub fn to_node(&self) -> Node {
        let gpus = (0..self.gpus).map(|minor| Gpu {
            uuid: format!("GPU-{}-{minor}", self.name).into(),
            minor,
            model: self.model.clone(),
            memory_bytes: Bytes(GPU_MIB << 20),
            numa: None,
            pci: None,
            withheld: None,
        });
        let mut node = Node::new(self.name.as_str(), gpus.collect());
        node.cpu_milli = Some(self.cpu);
        node.memory_bytes = Some(self.memory);
        node
    }
}

impl TracePod {
    /// Returns the compute requested of all GPUs together, in thousandths of a percent of one GPU.
    pub fn total_cores(&self) -> u64 {
        u64::from(self.gpus) * u64::from(self.cores.as_millipercent())
    }

    /// Converts to an ask that the allocator understands.
    pub fn to_ask(&self) -> PodAsk {
        let mib =
            u64::from(self.cores.as_millipercent()) * GPU_MIB / u64::from(Cores::WHOLE.as_millipercent());
        let share = ShareAsk {
            memory: MemoryAsk::Exactly(Bytes(mib << 20)),
            cores: CoresAsk::Exactly(self.cores),
            whole: self.cores == Cores::WHOLE,
            ceiling: None,
        };
        let ask = Ask {
            container: "main".into(),
            role: ContainerRole::App,
            want: WantedGpus { count: self.gpus, share },
        };
        // Exact match: A10 must not match A100.
        let models = self.models.iter().map(|model| format!("={model}"));
        let models = Selector { only: models.collect(), never: Vec::new() };
        PodAsk {
            asks: if self.gpus > 0 { vec![ask] } else { Vec::new() },
            constraints: if self.gpus > 0 {
                Constraints { models, ..Constraints::default() }
            } else {
                Constraints::default()
            },
            cpu: self.cpu,
            memory: self.memory,
            oversubscribe: false,
            turns: TurnPreferences::default(),
        }
    }
}

/// Returns the compute of all nodes together, in thousandths of a percent of one GPU.
pub fn total_cores(nodes: &[TraceNode]) -> u64 {
    nodes.iter().map(|node| u64::from(node.gpus) * u64::from(Cores::WHOLE.as_millipercent())).sum()
}

/// Why a trace cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// The file has no data lines.
    #[error("the file has no lines below its header: it needs one line per {0}")]
    Empty(&'static str),
    /// A required column is missing.
    #[error("the header has no column \"{column}\": it has {found}")]
    Column {
        /// The name of the missing column.
        column: &'static str,
        /// The columns that the header has.
        found: String,
    },
    /// A line is invalid.
    #[error("line {line}: {message}")]
    Line {
        /// The line number, counted from 1 for the header.
        line: usize,
        /// The reason and how to correct it.
        message: String,
    },
}

/// Parses a list of nodes with the columns `sn,cpu_milli,memory_mib,gpu,model`.
pub fn read_nodes(text: &str) -> Result<Vec<TraceNode>, TraceError> {
    let table = CsvTable::read(text, &["sn", "cpu_milli", "memory_mib", "gpu", "model"])?;
    let mut nodes = Vec::with_capacity(table.rows.len());
    let mut names = std::collections::HashSet::new();
    for row in &table.rows {
        let gpus = row.number_up_to("gpu", MAX_GPUS)?;
        // A node without GPUs needs no model.
        let model = if gpus == 0 { row.optional("model").unwrap_or("") } else { row.text("model")? };
        let node = TraceNode {
            name: row.text("sn")?.to_string(),
            cpu: MilliCpu(row.number("cpu_milli")?),
            memory: row.mib("memory_mib")?,
            gpus,
            model: model.to_string(),
        };
        if !names.insert(node.name.clone()) {
            return Err(row.error(format!("duplicate node \"{}\"", node.name)));
        }
        nodes.push(node);
    }
    if nodes.is_empty() { Err(TraceError::Empty("node")) } else { Ok(nodes) }
}

/// Parses a list of pods with the columns `name,cpu_milli,memory_mib,num_gpu,gpu_milli` and optionally `gpu_spec`.
pub fn read_pods(text: &str) -> Result<Vec<TracePod>, TraceError> {
    let table = CsvTable::read(text, &["name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"])?;
    let mut pods = Vec::with_capacity(table.rows.len());
    for row in &table.rows {
        let gpus = row.number_up_to("num_gpu", MAX_GPUS)?;
        let units = row.number_up_to("gpu_milli", TRACE_UNITS_PER_GPU)?;
        if gpus > 0 && units == 0 {
            return Err(row.error(format!("num_gpu is {gpus} and gpu_milli is 0: write 1 to 1000")));
        }
        let models = row.optional("gpu_spec").unwrap_or("").split('|').filter(|model| !model.is_empty());
        pods.push(TracePod {
            name: row.text("name")?.to_string(),
            cpu: MilliCpu(row.number("cpu_milli")?),
            memory: row.mib("memory_mib")?,
            gpus,
            // A request for several GPUs is always for whole ones.
            cores: if gpus > 1 {
                Cores::WHOLE
            } else {
                Cores::millipercent(units * CORES_PER_TRACE_UNIT).unwrap_or(Cores::WHOLE)
            },
            models: models.map(String::from).collect(),
        });
    }
    if pods.is_empty() { Err(TraceError::Empty("pod")) } else { Ok(pods) }
}

struct CsvTable<'a> {
    rows: Vec<CsvRow<'a>>,
}

struct CsvRow<'a> {
    line: usize,
    header: std::rc::Rc<Vec<&'a str>>,
    cells: Vec<&'a str>,
}

impl<'a> CsvTable<'a> {
    fn read(text: &'a str, needed: &[&'static str]) -> Result<CsvTable<'a>, TraceError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut lines = text.lines().enumerate();
        let header: Vec<&str> = lines.next().map_or("", |(_, line)| line).split(',').map(str::trim).collect();
        for column in needed {
            if !header.contains(column) {
                return Err(TraceError::Column { column, found: header.join(", ") });
            }
        }
        let header = std::rc::Rc::new(header);
        let rows = lines.filter(|(_, line)| !line.trim().is_empty()).map(|(index, line)| {
            let cells: Vec<&str> = line.split(',').map(str::trim).collect();
            let row = CsvRow { line: index + 1, header: std::rc::Rc::clone(&header), cells };
            if line.contains('"') {
                return Err(
                    row.error("quoted values are not supported: write plain values without commas".into())
                );
            }
            if row.cells.len() > row.header.len() {
                let (cells, columns) = (row.cells.len(), row.header.len());
                return Err(row.error(format!("{cells} values for {columns} columns")));
            }
            Ok(row)
        });
        Ok(CsvTable { rows: rows.collect::<Result<_, _>>()? })
    }
}

impl CsvRow<'_> {
    fn error(&self, message: String) -> TraceError {
        TraceError::Line { line: self.line, message }
    }

    fn optional(&self, column: &str) -> Option<&str> {
        let at = self.header.iter().position(|name| *name == column)?;
        self.cells.get(at).copied()
    }

    fn text(&self, column: &'static str) -> Result<&str, TraceError> {
        self.optional(column)
            .filter(|text| !text.is_empty())
            .ok_or_else(|| self.error(format!("no value for {column}")))
    }

    fn number(&self, column: &'static str) -> Result<u64, TraceError> {
        let text = self.text(column)?;
        text.parse().map_err(|_| self.error(format!("{column} is \"{text}\": write a whole number")))
    }

    fn number_up_to(&self, column: &'static str, max: u32) -> Result<u32, TraceError> {
        let number = self.number(column)?;
        u32::try_from(number)
            .ok()
            .filter(|number| *number <= max)
            .ok_or_else(|| self.error(format!("{column} is {number}: the maximum is {max}")))
    }

    fn mib(&self, column: &'static str) -> Result<Bytes, TraceError> {
        let number = self.number(column)?;
        Bytes::mib(number).ok_or_else(|| self.error(format!("{column} is {number}: too large")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_read_in_any_order() {
        let pods = read_pods("gpu_milli,num_gpu,name,cpu_milli,memory_mib\n460,1,a,6000,12288\n0,0,b,1,1\n")
            .unwrap();
        assert_eq!((pods[0].name.as_str(), pods[0].total_cores()), ("a", 46_000));
        assert!(pods[1].to_ask().asks.is_empty());
    }

    #[test]
    fn errors_name_the_line_and_the_reason() {
        let error = |text: &str| read_pods(text).unwrap_err().to_string();
        assert_eq!(
            error("name,cpu_milli\n"),
            "the header has no column \"memory_mib\": it has name, cpu_milli"
        );
        let head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\n";
        assert_eq!(error(head), "the file has no lines below its header: it needs one line per pod");
        assert_eq!(error(&format!("{head}a,x,1,1,1")), "line 2: cpu_milli is \"x\": write a whole number");
        assert_eq!(error(&format!("{head}a,1,1,1,1001")), "line 2: gpu_milli is 1001: the maximum is 1000");
        assert_eq!(error(&format!("{head}a,1,1,1")), "line 2: no value for gpu_milli");
        assert_eq!(error(&format!("{head}a,1,1,1,1,9")), "line 2: 6 values for 5 columns");
    }
}
