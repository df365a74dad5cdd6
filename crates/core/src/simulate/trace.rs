//! Trace files: nodes and pods as comma-separated values, read by the names in their header.

use crate::model::{
    Ask, Bytes, Constraints, ContainerRole, Cores, CoresAsk, Gpu, MemoryAsk, MilliCpu, Node, PodAsk,
    Selector, ShareAsk, WantedGpus,
};

/// Memory of a GPU in MiB. Traces measure a share in thousandths of a GPU, and a share has as many MiB.
const GPU_MIB: u64 = 1000;
/// Compute of a thousandth of a GPU, the unit of a trace, in thousandths of a percent.
const CORES_PER_TRACE_UNIT: u32 = Cores::WHOLE.as_millipercent() / TRACE_UNITS_PER_GPU;
/// Parts of a GPU in which traces measure.
const TRACE_UNITS_PER_GPU: u32 = 1000;
/// Maximum number of GPUs of a node or pod in a trace.
const MAX_GPUS: u32 = crate::model::MAX_GPUS_PER_NODE as u32;

/// A node of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceNode {
    /// Its name.
    pub name: String,
    /// CPU.
    pub cpu: MilliCpu,
    /// Memory.
    pub memory: Bytes,
    /// GPUs.
    pub gpus: u32,
    /// Their model.
    pub model: String,
}

/// A pod of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracePod {
    /// Its name.
    pub name: String,
    /// CPU.
    pub cpu: MilliCpu,
    /// Memory.
    pub memory: Bytes,
    /// GPUs; 0 for none.
    pub gpus: u32,
    /// Compute of each GPU; [`Cores::WHOLE`] for whole GPUs.
    pub cores: Cores,
    /// Models it may run on; empty for any.
    pub models: Vec<String>,
}

impl TraceNode {
    /// As a node of the model.
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

    /// As an ask of the model.
    pub fn to_ask(&self) -> PodAsk {
        let mib =
            u64::from(self.cores.as_millipercent()) * GPU_MIB / u64::from(Cores::WHOLE.as_millipercent());
        let part = ShareAsk {
            memory: MemoryAsk::Exactly(Bytes(mib << 20)),
            cores: CoresAsk::Exactly(self.cores),
            whole: self.cores == Cores::WHOLE,
            ceiling: None,
        };
        let ask = Ask {
            container: "main".into(),
            role: ContainerRole::App,
            want: WantedGpus { count: self.gpus, part },
        };
        // Exactly: an A10 is no A100.
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
    /// Nothing in it.
    #[error("the file has no lines below its header: it needs one line per {0}")]
    Empty(&'static str),
    /// A column is missing.
    #[error("the header has no column \"{column}\": it has {found}")]
    Column {
        /// The column.
        column: &'static str,
        /// What the header has.
        found: String,
    },
    /// A line is wrong.
    #[error("line {line}: {message}")]
    Line {
        /// Its number, the header being 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
}

/// Reads `sn,cpu_milli,memory_mib,gpu,model`.
pub fn read_nodes(text: &str) -> Result<Vec<TraceNode>, TraceError> {
    let table = Table::read(text, &["sn", "cpu_milli", "memory_mib", "gpu", "model"])?;
    let mut nodes = Vec::with_capacity(table.rows.len());
    let mut names = std::collections::HashSet::new();
    for row in &table.rows {
        let gpus = row.small("gpu", MAX_GPUS)?;
        // A node without GPUs has no model to name.
        let model = if gpus == 0 { row.optional("model").unwrap_or("") } else { row.text("model")? };
        let node = TraceNode {
            name: row.text("sn")?.to_string(),
            cpu: MilliCpu(row.number("cpu_milli")?),
            memory: row.mib("memory_mib")?,
            gpus,
            model: model.to_string(),
        };
        if !names.insert(node.name.clone()) {
            return Err(row.error(format!("a second node called \"{}\"", node.name)));
        }
        nodes.push(node);
    }
    if nodes.is_empty() { Err(TraceError::Empty("node")) } else { Ok(nodes) }
}

/// Reads `name,cpu_milli,memory_mib,num_gpu,gpu_milli` and, where there is one, `gpu_spec`.
pub fn read_pods(text: &str) -> Result<Vec<TracePod>, TraceError> {
    let table = Table::read(text, &["name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"])?;
    let mut pods = Vec::with_capacity(table.rows.len());
    for row in &table.rows {
        let gpus = row.small("num_gpu", MAX_GPUS)?;
        let units = row.small("gpu_milli", TRACE_UNITS_PER_GPU)?;
        if gpus > 0 && units == 0 {
            return Err(row.error(format!("num_gpu is {gpus} and gpu_milli is 0: write 1 to 1000")));
        }
        let models = row.optional("gpu_spec").unwrap_or("").split('|').filter(|model| !model.is_empty());
        pods.push(TracePod {
            name: row.text("name")?.to_string(),
            cpu: MilliCpu(row.number("cpu_milli")?),
            memory: row.mib("memory_mib")?,
            gpus,
            // Several GPUs are always whole ones.
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

struct Table<'a> {
    rows: Vec<Row<'a>>,
}

struct Row<'a> {
    line: usize,
    header: std::rc::Rc<Vec<&'a str>>,
    cells: Vec<&'a str>,
}

impl<'a> Table<'a> {
    fn read(text: &'a str, needed: &[&'static str]) -> Result<Table<'a>, TraceError> {
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
            let row = Row { line: index + 1, header: std::rc::Rc::clone(&header), cells };
            if line.contains('"') {
                return Err(row.error("quoted values are not read: write plain ones without commas".into()));
            }
            if row.cells.len() > row.header.len() {
                let (cells, columns) = (row.cells.len(), row.header.len());
                return Err(row.error(format!("{cells} values for {columns} columns")));
            }
            Ok(row)
        });
        Ok(Table { rows: rows.collect::<Result<_, _>>()? })
    }
}

impl Row<'_> {
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

    fn small(&self, column: &'static str, most: u32) -> Result<u32, TraceError> {
        let number = self.number(column)?;
        u32::try_from(number)
            .ok()
            .filter(|number| *number <= most)
            .ok_or_else(|| self.error(format!("{column} is {number}: at most {most} is possible")))
    }

    fn mib(&self, column: &'static str) -> Result<Bytes, TraceError> {
        let number = self.number(column)?;
        Bytes::mib(number).ok_or_else(|| self.error(format!("{column} is {number}: more than memory can be")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_by_header_in_any_order() {
        let pods = read_pods("gpu_milli,num_gpu,name,cpu_milli,memory_mib\n460,1,a,6000,12288\n0,0,b,1,1\n")
            .unwrap();
        assert_eq!((pods[0].name.as_str(), pods[0].total_cores()), ("a", 46_000));
        assert!(pods[1].to_ask().asks.is_empty());
    }

    #[test]
    fn says_what_is_wrong_and_where() {
        let error = |text: &str| read_pods(text).unwrap_err().to_string();
        assert_eq!(
            error("name,cpu_milli\n"),
            "the header has no column \"memory_mib\": it has name, cpu_milli"
        );
        let head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\n";
        assert_eq!(error(head), "the file has no lines below its header: it needs one line per pod");
        assert_eq!(error(&format!("{head}a,x,1,1,1")), "line 2: cpu_milli is \"x\": write a whole number");
        assert_eq!(
            error(&format!("{head}a,1,1,1,1001")),
            "line 2: gpu_milli is 1001: at most 1000 is possible"
        );
        assert_eq!(error(&format!("{head}a,1,1,1")), "line 2: no value for gpu_milli");
        assert_eq!(error(&format!("{head}a,1,1,1,1,9")), "line 2: 6 values for 5 columns");
    }
}
