//! Metrics of the server for Prometheus: requests by route and status, start times by [`StartPhase`], the pool.
//!
//! Labels are route patterns, methods, statuses, phases, reasons and templates in use, so the number of time series is
//! bounded regardless of client behavior.

mod pool_tables;
mod table;

use std::{sync::Arc, time::Duration};

use hyper::Method;
use model::{StartPhase, Timeline};
use prometheus_client::{
    encoding::{
        EncodeLabelSet,
        text::{encode_eof, encode_registry},
    },
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::Registry,
};

use crate::egress::CallCounts;
pub(crate) use table::Tables;

/// Upper bounds of the histogram buckets in seconds. The range covers lookups as well as cold boots.
const BOUNDS: [f64; 14] = [
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    method: &'static str,
    route: String,
    status: u16,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RouteLabels {
    method: &'static str,
    route: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PhaseLabels {
    phase: &'static str,
    warm: &'static str,
}

/// Metrics of requests and starts. The pool counts its own metrics; see [`PoolStats`].
#[derive(Debug)]
pub struct Telemetry {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    durations: Family<RouteLabels, Histogram>,
    phases: Family<PhaseLabels, Histogram>,
}

impl Default for Telemetry {
    fn default() -> Self {
        Self::new()
    }
}

fn histogram() -> Histogram {
    Histogram::new(BOUNDS)
}

impl Telemetry {
    #[must_use]
    pub fn new() -> Self {
        let requests = Family::default();
        let durations = Family::new_with_constructor(histogram as fn() -> Histogram);
        let phases = Family::new_with_constructor(histogram as fn() -> Histogram);
        let mut registry = Registry::with_prefix("cube");
        registry.register(
            "api_requests",
            "Requests to the control plane",
            requests.clone(),
        );
        registry.register(
            "api_request_duration_seconds",
            "Time from the head of the request to the head of the response",
            durations.clone(),
        );
        registry.register(
            "start_phase_seconds",
            "Time from the acceptance of a create to each phase of its start",
            phases.clone(),
        );
        Self {
            registry,
            requests,
            durations,
            phases,
        }
    }

    #[must_use]
    pub fn shared() -> Arc<Self> {
        Arc::new(Self::new())
    }

    /// Records a completed request. `took` is the time from the head of the request to the head of the response.
    pub fn request(&self, method: &Method, route: String, status: u16, took: Duration) {
        let method = name_of(method);
        let labels = RouteLabels { method, route };
        let duration = self.durations.get_or_create(&labels);
        duration.observe(took.as_secs_f64());
        drop(duration);
        let RouteLabels { method, route } = labels;
        let labels = RequestLabels {
            method,
            route,
            status,
        };
        self.requests.get_or_create(&labels).inc();
    }

    /// Records when a sandbox reached each phase of its start, relative to the acceptance of its create request.
    pub fn started(&self, timeline: &Timeline, warm: bool) {
        let Some(accepted) = timeline.at(StartPhase::Accepted) else {
            return;
        };
        let warm = if warm { "true" } else { "false" };
        for (phase, at) in timeline.iter() {
            // A warm slot passed its first phases before the request was accepted.
            let Some(since) = at.checked_sub(accepted) else {
                continue;
            };
            let phase = phase.name();
            let labels = PhaseLabels { phase, warm };
            let phases = self.phases.get_or_create(&labels);
            phases.observe(Duration::from_nanos(since).as_secs_f64());
        }
    }

    /// All metrics in OpenMetrics text format. `tables` have the current values of the other parts of the server.
    #[must_use]
    pub(crate) fn render(&self, tables: Tables) -> String {
        let mut current = Registry::with_prefix("cube");
        current.register_collector(Box::new(tables));
        let mut text = String::new();
        // Writing to a string cannot fail.
        let encoded = encode_registry(&mut text, &self.registry)
            .and_then(|()| encode_registry(&mut text, &current))
            .and_then(|()| encode_eof(&mut text));
        if encoded.is_err() {
            tracing::error!("cannot encode the metrics of the server");
        }
        text
    }
}

/// Figures of the egress proxy since the start of this server.
#[derive(Clone, Copy, Debug, Default)]
pub struct EgressStats {
    /// Number of proxy starts.
    pub starts: u64,
    pub calls: CallCounts,
    /// Calls that were not recorded, or not in the file.
    pub calls_lost: u64,
}

impl Tables {
    pub(crate) fn egress(&mut self, stats: &EgressStats) {
        let help = "Starts of the egress proxy";
        self.counter("egress_proxy_starts", help, stats.starts);
        let help = "Outbound calls without a record";
        self.counter("egress_calls_lost", help, stats.calls_lost);
        let CallCounts {
            passed,
            ruled,
            refused,
        } = stats.calls;
        let calls = [("passed", passed), ("ruled", ruled), ("refused", refused)];
        let calls = calls.map(|(outcome, n)| (vec![("outcome", outcome.to_owned())], n));
        let help = "Outbound calls through the egress proxy";
        self.counters("egress_calls", help, calls);
    }

    /// Adds the deliveries to webhooks, by result.
    pub(crate) fn webhooks(&mut self, counts: &[(&'static str, u64)]) {
        let counts = counts.iter();
        let counts = counts.map(|(result, n)| (vec![("result", (*result).to_owned())], *n));
        let help = "Deliveries of events to webhooks";
        self.counters("webhook_deliveries", help, counts);
    }
}

fn name_of(method: &Method) -> &'static str {
    let known = [
        (Method::GET, "GET"),
        (Method::POST, "POST"),
        (Method::PUT, "PUT"),
        (Method::PATCH, "PATCH"),
        (Method::DELETE, "DELETE"),
    ];
    let found = known.into_iter().find(|(known, _)| known == method);
    found.map_or("other", |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use netisolation::Reason;
    use pool::{Installed, PoolStats, RebuildState, StockStats, VmmId, VmmUse};

    use super::*;

    #[test]
    fn metrics_are_one_well_formed_text() {
        let telemetry = Telemetry::new();
        let route = "/sandboxes/{id}".to_owned();
        telemetry.request(&Method::GET, route, 404, Duration::from_millis(3));
        let mut timeline = Timeline::default();
        timeline.stamp(StartPhase::ProcessStarted, 1);
        timeline.stamp(StartPhase::Accepted, 1_000);
        timeline.stamp(StartPhase::Resumed, 2_001_000);
        telemetry.started(&timeline, true);
        let mut stats = PoolStats {
            warm: 3,
            ..PoolStats::default()
        };
        stats.failed.insert("spawn", 2);
        stats.network.bytes_in = 7;
        let vmm = VmmUse {
            paused: 4,
            ..VmmUse::default()
        };
        stats.vmms.insert(VmmId::default(), vmm);
        let base = Installed {
            vmm: VmmId::default(),
            state: RebuildState::Failed,
        };
        stats.installed.insert("base".to_owned(), base);
        stats.network.refused.insert(Reason::NotIp, 5);
        let stock = StockStats {
            wanted: 9,
            is_loaded: true,
            hits: 8,
            ..StockStats::default()
        };
        stats.stocks.insert("mine:v1".to_owned(), stock);
        let egress = EgressStats {
            starts: 2,
            ..EgressStats::default()
        };
        let mut tables = Tables::default();
        tables.pool(&stats);
        tables.egress(&egress);
        tables.webhooks(&[("delivered", 2)]);
        let text = telemetry.render(tables);
        let count =
            "cube_api_requests_total{method=\"GET\",route=\"/sandboxes/{id}\",status=\"404\"} 1";
        assert!(text.contains(count), "{text}");
        assert!(text.contains("cube_start_phase_seconds_count{phase=\"resumed\",warm=\"true\"} 1"));
        assert!(
            !text.contains("process_started"),
            "a phase before the request"
        );
        // Dashboards and alerts name these metrics, their types and their labels.
        let current = concat!(include_str!("telemetry/current.txt"), "# EOF\n");
        assert!(text.ends_with(current), "{text}");
        assert_eq!(text.matches("# EOF").count(), 1);
        let families = text.lines().filter(|l| l.starts_with("# TYPE"));
        let mut names: Vec<_> = families.collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "a metric family appears twice");
    }
}
