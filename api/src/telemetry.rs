//! Metrics of the server for Prometheus: requests by route and status, start times by [`StartPhase`], the pool.
//!
//! Labels are route patterns, methods, statuses, phases, reasons and templates in use, so the number of time series is
//! bounded regardless of client behavior.

use std::{collections::BTreeMap, fmt::Write, sync::Arc, time::Duration};

use hyper::Method;
use model::{StartPhase, Timeline};
use netisolation::{Counters, Reason};
use pool::{Installed, PoolStats, RebuildState, StockStats, VmmId, VmmUse};
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::Registry,
};

use crate::egress::CallCounts;

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

    /// All metrics, with the current values of the pool, in OpenMetrics text format. `cluster` contains metrics in this
    /// format, without an end mark.
    #[must_use]
    pub fn render(
        &self,
        stats: &PoolStats,
        egress: Option<&EgressStats>,
        webhooks: &[(&'static str, u64)],
        cluster: &str,
    ) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail. If an encoder fails nevertheless, there is no end mark to remove.
        if encode(&mut text, &self.registry).is_err() {
            tracing::error!("cannot encode the metrics of the server");
        }
        let end = text.strip_suffix("# EOF\n").map(str::len);
        text.truncate(end.unwrap_or(text.len()));
        if write_pool(&mut text, stats).is_err() {
            tracing::error!("cannot encode the metrics of the pool");
        }
        if let Some(egress) = egress
            && write_egress(&mut text, egress).is_err()
        {
            tracing::error!("cannot encode the metrics of the egress proxy");
        }
        if write_webhooks(&mut text, webhooks).is_err() {
            tracing::error!("cannot encode the metrics of webhooks");
        }
        text.push_str(cluster);
        text.push_str("# EOF\n");
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

fn write_egress(text: &mut String, stats: &EgressStats) -> std::fmt::Result {
    for (name, help, value) in [
        (
            "egress_proxy_starts",
            "Starts of the egress proxy",
            stats.starts,
        ),
        (
            "egress_calls_lost",
            "Outbound calls without a record",
            stats.calls_lost,
        ),
    ] {
        writeln!(
            text,
            "# HELP cube_{name} {help}.\n# TYPE cube_{name} counter\ncube_{name}_total {value}"
        )?;
    }
    writeln!(
        text,
        "# HELP cube_egress_calls Outbound calls through the egress proxy.\n# TYPE cube_egress_calls counter"
    )?;
    let CallCounts {
        passed,
        ruled,
        refused,
    } = stats.calls;
    for (outcome, count) in [("passed", passed), ("ruled", ruled), ("refused", refused)] {
        writeln!(
            text,
            "cube_egress_calls_total{{outcome=\"{outcome}\"}} {count}"
        )?;
    }
    Ok(())
}

fn write_webhooks(text: &mut String, counts: &[(&'static str, u64)]) -> std::fmt::Result {
    writeln!(
        text,
        "# HELP cube_webhook_deliveries Deliveries of events to webhooks.\n# TYPE cube_webhook_deliveries counter"
    )?;
    for (result, count) in counts {
        writeln!(
            text,
            "cube_webhook_deliveries_total{{result=\"{result}\"}} {count}"
        )?;
    }
    Ok(())
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

/// Writes the uses of each kept VMM. After a fix of the VMM, the lines with `present="false"` show what still uses an
/// older one.
fn write_vmms(text: &mut String, vmms: &BTreeMap<VmmId, VmmUse>) -> std::fmt::Result {
    writeln!(
        text,
        "# HELP cube_pool_vmm_uses VMs, pauses and templates of each cube-vmm, named by the start of its SHA-256.\n\
         # TYPE cube_pool_vmm_uses gauge"
    )?;
    for (id, uses) in vmms {
        let (vmm, present) = (&id.as_str()[..12], uses.is_present);
        for (kind, count) in [
            ("running", uses.running),
            ("paused", uses.paused),
            ("templates", uses.templates),
        ] {
            writeln!(
                text,
                "cube_pool_vmm_uses{{vmm=\"{vmm}\",present=\"{present}\",use=\"{kind}\"}} {count}"
            )?;
        }
    }
    Ok(())
}

/// Writes the VMM of each installed template, and whether the template is being rebuilt with the current one. The
/// operator chooses the names of installed templates.
fn write_installed(text: &mut String, installed: &BTreeMap<String, Installed>) -> std::fmt::Result {
    writeln!(
        text,
        "# HELP cube_pool_installed_template Installed templates: 1 for the state of each.\n\
         # TYPE cube_pool_installed_template gauge"
    )?;
    for (name, template) in installed {
        let vmm = &template.vmm.as_str()[..12];
        for state in RebuildState::ALL {
            let is_it = u8::from(template.state == state);
            let state = state.name();
            writeln!(
                text,
                "cube_pool_installed_template{{template={name:?},vmm=\"{vmm}\",state=\"{state}\"}} {is_it}"
            )?;
        }
    }
    Ok(())
}

/// Writes the warm stock of each template that has been used, has warm slots, or is loaded. The pool checks names: they
/// contain no character that must be escaped.
fn write_stocks(text: &mut String, stocks: &BTreeMap<String, StockStats>) -> std::fmt::Result {
    type Field = fn(&StockStats) -> u64;
    let families: [(&str, &str, &str, Field); 6] = [
        (
            "wanted",
            "gauge",
            "Warm slots by configuration and demand",
            |s| s.wanted.into(),
        ),
        (
            "target",
            "gauge",
            "Warm slots up to which the stock is filled",
            |s| s.target.into(),
        ),
        ("warm", "gauge", "Warm slots", |s| s.warm.into()),
        (
            "loaded",
            "gauge",
            "1 if the template's memory is loaded",
            |s| s.is_loaded.into(),
        ),
        ("hits", "counter", "Creates served by a warm slot", |s| {
            s.hits
        }),
        (
            "misses",
            "counter",
            "Creates that had to restore a new VM",
            |s| s.misses,
        ),
    ];
    for (name, kind, help, field) in families {
        writeln!(
            text,
            "# HELP cube_pool_template_{name} {help}, of each template in use.\n\
             # TYPE cube_pool_template_{name} {kind}"
        )?;
        let total = if kind == "counter" { "_total" } else { "" };
        for (template, stock) in stocks {
            let value = field(stock);
            writeln!(
                text,
                "cube_pool_template_{name}{total}{{template={template:?}}} {value}"
            )?;
        }
    }
    Ok(())
}

/// Writes the metrics that the pool counts.
fn write_pool(text: &mut String, stats: &PoolStats) -> std::fmt::Result {
    let gauges = [
        (
            "pool_running",
            "Leased and running",
            u64::from(stats.running),
        ),
        ("pool_paused", "Paused on disk", u64::from(stats.paused)),
        ("pool_warm", "Warm slots", u64::from(stats.warm)),
        (
            "pool_filling",
            "Slots being filled",
            u64::from(stats.filling),
        ),
        (
            "pool_warm_wanted",
            "Warm slots by configuration and demand",
            u64::from(stats.warm_wanted),
        ),
        (
            "pool_warm_target",
            "Warm slots up to which the stock is filled",
            u64::from(stats.warm_target),
        ),
        (
            "pool_warm_limit",
            "Limit on warm slots",
            u64::from(stats.warm_limit),
        ),
        (
            "pool_warm_bytes",
            "Memory of warm slots and loaded templates",
            stats.warm_bytes,
        ),
        (
            "pool_warm_limit_bytes",
            "Current limit on the memory of warm slots and loaded templates",
            stats.warm_bytes_limit,
        ),
        ("pool_templates", "Templates", u64::from(stats.templates)),
        (
            "pool_templates_loaded",
            "Templates whose memory is loaded",
            u64::from(stats.templates_loaded),
        ),
        (
            "pool_memory_diffs",
            "Templates whose memory is stored as a diff",
            u64::from(stats.memory_diffs),
        ),
        (
            "pool_memory_diff_bytes",
            "Disk space of the diffs",
            stats.memory_diff_bytes,
        ),
        (
            "pool_memory_diff_memory_bytes",
            "Memory that is stored as diffs",
            stats.memory_diff_memory_bytes,
        ),
        (
            "pool_expected_bytes",
            "Expected memory of one more sandbox",
            stats.expected_bytes,
        ),
        (
            "pool_available_bytes",
            "Memory available to sandboxes",
            stats.available_bytes,
        ),
        (
            "pool_images",
            "Installed templates and older versions of them that are in use",
            u64::from(stats.images),
        ),
    ];
    for (name, help, value) in gauges {
        writeln!(
            text,
            "# HELP cube_{name} {help}.\n# TYPE cube_{name} gauge\ncube_{name} {value}"
        )?;
    }
    write_vmms(text, &stats.vmms)?;
    write_installed(text, &stats.installed)?;
    write_stocks(text, &stats.stocks)?;
    let counters = [
        (
            "pool_warm_hits",
            "Creates served by a warm slot",
            stats.warm_hits,
        ),
        (
            "pool_warm_misses",
            "Creates that had to restore a new VM",
            stats.warm_misses,
        ),
        (
            "pool_refused",
            "Creates refused for lack of resources",
            stats.refused,
        ),
        (
            "pool_wakes_waited",
            "Resumes by traffic that waited for room",
            stats.wakes_waited,
        ),
        ("pool_died", "VMs that ended unexpectedly", stats.died),
        (
            "pool_rebuilds",
            "Installed templates that were rebuilt",
            stats.rebuilt,
        ),
        (
            "pool_rebuilds_failed",
            "Rebuilds of installed templates that failed",
            stats.rebuilds_failed,
        ),
    ];
    for (name, help, value) in counters {
        writeln!(
            text,
            "# HELP cube_{name} {help}.\n# TYPE cube_{name} counter\ncube_{name}_total {value}"
        )?;
    }
    write_network(text, &stats.network)?;
    writeln!(
        text,
        "# HELP cube_pool_failed Failed starts by failed step.\n# TYPE cube_pool_failed counter"
    )?;
    for (what, value) in &stats.failed {
        writeln!(text, "cube_pool_failed_total{{what={what:?}}} {value}")?;
    }
    Ok(())
}

/// Writes the traffic counters of all sandboxes, including ended ones, since the eBPF programs were loaded.
fn write_network(text: &mut String, network: &Counters) -> std::fmt::Result {
    let passed = [
        (
            "packets",
            "Packets",
            network.packets_out,
            network.packets_in,
        ),
        ("bytes", "Bytes", network.bytes_out, network.bytes_in),
    ];
    for (unit, word, out, back) in passed {
        writeln!(
            text,
            "# HELP cube_network_{unit} {word} that passed, from sandboxes and to them.\n\
             # TYPE cube_network_{unit} counter\n\
             cube_network_{unit}_total{{direction=\"out\"}} {out}\n\
             cube_network_{unit}_total{{direction=\"in\"}} {back}"
        )?;
    }
    writeln!(
        text,
        "# HELP cube_network_flows Flows started by sandboxes.\n\
         # TYPE cube_network_flows counter\ncube_network_flows_total {}\n\
         # HELP cube_network_events_lost Refused packets whose record was lost.\n\
         # TYPE cube_network_events_lost counter\ncube_network_events_lost_total {}\n\
         # HELP cube_network_refused Packets refused, by reason.\n\
         # TYPE cube_network_refused counter",
        network.flows, network.events_lost
    )?;
    for (reason, packets) in &network.refused {
        let reason = name_of_reason(*reason);
        writeln!(
            text,
            "cube_network_refused_total{{reason={reason:?}}} {packets}"
        )?;
    }
    Ok(())
}

/// The name of a reason in JSON and in metric labels.
pub(crate) fn name_of_reason(reason: Reason) -> String {
    let name = serde_json::to_value(reason).ok();
    let name = name.as_ref().and_then(serde_json::Value::as_str);
    name.unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
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
        let text = telemetry.render(&stats, Some(&egress), &[("delivered", 2)], "");
        assert!(text.contains("cube_egress_proxy_starts_total 2\n"));
        assert!(text.contains("cube_egress_calls_total{outcome=\"refused\"} 0\n"));
        for line in [
            "wanted{template=\"mine:v1\"} 9\n",
            "loaded{template=\"mine:v1\"} 1\n",
            "hits_total{template=\"mine:v1\"} 8\n",
        ] {
            assert!(
                text.contains(&format!("cube_pool_template_{line}")),
                "{text}"
            );
        }
        let count =
            "cube_api_requests_total{method=\"GET\",route=\"/sandboxes/{id}\",status=\"404\"} 1";
        assert!(text.contains(count), "{text}");
        assert!(text.contains("cube_start_phase_seconds_count{phase=\"resumed\",warm=\"true\"} 1"));
        assert!(
            !text.contains("process_started"),
            "a phase before the request"
        );
        assert!(text.contains("cube_pool_warm 3\n"));
        assert!(text.contains("cube_pool_failed_total{what=\"spawn\"} 2\n"));
        let uses = "cube_pool_vmm_uses{vmm=\"e3b0c44298fc\",present=\"false\",use=\"paused\"} 4\n";
        assert!(text.contains(uses), "{text}");
        for (state, is_it) in [("failed", 1), ("current", 0)] {
            let line = format!(
                "cube_pool_installed_template{{template=\"base\",vmm=\"e3b0c44298fc\",state=\"{state}\"}} {is_it}\n"
            );
            assert!(text.contains(&line), "{text}");
        }
        assert!(text.contains("cube_network_bytes_total{direction=\"in\"} 7\n"));
        assert!(text.contains("cube_network_refused_total{reason=\"not_ip\"} 5\n"));
        assert!(text.ends_with("# EOF\n"));
        assert_eq!(text.matches("# EOF").count(), 1);
        let families = text.lines().filter(|l| l.starts_with("# TYPE"));
        let mut names: Vec<_> = families.collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "a metric family appears twice");
    }
}
