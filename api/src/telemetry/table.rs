//! Metrics whose values are read when a client asks for them: tables of samples.

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet},
    metrics::MetricType,
};

/// Names and values of a sample's labels. No value needs an escape.
pub(crate) type Labels = Vec<(&'static str, String)>;

/// Tables in the order in which they are exposed.
#[derive(Debug, Default)]
pub(crate) struct Tables(Vec<Table>);

#[derive(Debug)]
struct Table {
    name: String,
    help: String,
    kind: MetricType,
    samples: Vec<(Labels, Value)>,
}

#[derive(Clone, Copy, Debug)]
enum Value {
    Count(u64),
    Seconds(f64),
}

impl Tables {
    /// Adds a gauge without labels. `name` is without the prefix, and `help` without a full stop.
    pub(crate) fn gauge(&mut self, name: &str, help: &str, value: impl Into<u64>) {
        self.gauges(name, help, [(Vec::new(), value.into())]);
    }

    /// Adds a gauge in seconds.
    pub(crate) fn seconds(&mut self, name: &str, help: &str, value: f64) {
        let samples = vec![(Vec::new(), Value::Seconds(value))];
        self.add(name, help, MetricType::Gauge, samples);
    }

    /// Adds a counter without labels. `name` is also without the suffix `_total`.
    pub(crate) fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.counters(name, help, [(Vec::new(), value)]);
    }

    /// Adds a gauge with these labels and values.
    pub(crate) fn gauges(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) {
        self.add(name, help, MetricType::Gauge, counts(samples));
    }

    /// Adds a counter with these labels and values.
    pub(crate) fn counters(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) {
        self.add(name, help, MetricType::Counter, counts(samples));
    }

    fn add(&mut self, name: &str, help: &str, kind: MetricType, samples: Vec<(Labels, Value)>) {
        self.0.push(Table {
            name: name.to_owned(),
            help: format!("{help}."),
            kind,
            samples,
        });
    }
}

fn counts(samples: impl IntoIterator<Item = (Labels, u64)>) -> Vec<(Labels, Value)> {
    let samples = samples.into_iter();
    samples
        .map(|(labels, n)| (labels, Value::Count(n)))
        .collect()
}

impl Collector for Tables {
    fn encode(&self, mut encoder: DescriptorEncoder) -> std::fmt::Result {
        for table in &self.0 {
            let kind = table.kind;
            let mut metric = encoder.encode_descriptor(&table.name, &table.help, None, kind)?;
            for (labels, value) in &table.samples {
                if labels.is_empty() {
                    value.encode(kind, &mut metric)?;
                } else {
                    value.encode(kind, &mut metric.encode_family(labels)?)?;
                }
            }
        }
        Ok(())
    }
}

impl Value {
    fn encode(self, kind: MetricType, encoder: &mut MetricEncoder) -> std::fmt::Result {
        match (kind, self) {
            (MetricType::Counter, Self::Count(n)) => {
                encoder.encode_counter::<NoLabelSet, u64, u64>(&n, None)
            }
            (_, Self::Count(n)) => encoder.encode_gauge(&n),
            (_, Self::Seconds(seconds)) => encoder.encode_gauge(&seconds),
        }
    }
}
