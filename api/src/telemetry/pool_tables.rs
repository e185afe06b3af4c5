//! The metrics that the pool counts.

use netisolation::Counters;
use pool::{PoolStats, RebuildState, StockStats};

use super::table::{Labels, Tables};
use crate::events::name_of_reason;

impl Tables {
    /// Adds the metrics of the pool and of its network.
    pub(crate) fn pool(&mut self, s: &PoolStats) {
        self.gauge("pool_running", "Leased and running", s.running);
        self.gauge("pool_paused", "Paused on disk", s.paused);
        self.gauge("pool_warm", "Warm slots", s.warm);
        self.gauge("pool_filling", "Slots being filled", s.filling);
        let help = "Warm slots by configuration and demand";
        self.gauge("pool_warm_wanted", help, s.warm_wanted);
        let help = "Warm slots up to which the stock is filled";
        self.gauge("pool_warm_target", help, s.warm_target);
        self.gauge("pool_warm_limit", "Limit on warm slots", s.warm_limit);
        let help = "Memory of warm slots and loaded templates";
        self.gauge("pool_warm_bytes", help, s.warm_bytes);
        let help = "Current limit on the memory of warm slots and loaded templates";
        self.gauge("pool_warm_limit_bytes", help, s.warm_bytes_limit);
        self.gauge("pool_templates", "Templates", s.templates);
        let help = "Templates whose memory is loaded";
        self.gauge("pool_templates_loaded", help, s.templates_loaded);
        let help = "Templates whose memory is stored as a diff";
        self.gauge("pool_memory_diffs", help, s.memory_diffs);
        let help = "Disk space of the diffs";
        self.gauge("pool_memory_diff_bytes", help, s.memory_diff_bytes);
        let (help, bytes) = ("Memory that is stored as diffs", s.memory_diff_memory_bytes);
        self.gauge("pool_memory_diff_memory_bytes", help, bytes);
        let help = "Expected memory of one more sandbox";
        self.gauge("pool_expected_bytes", help, s.expected_bytes);
        let help = "Measured private memory of the running sandboxes";
        self.gauge("pool_measured_bytes", help, s.measured_bytes);
        let help = "Memory that sandboxes are expected to take in addition, with the margin";
        self.gauge("pool_promised_bytes", help, s.promised_bytes);
        let help = "Memory for further sandboxes";
        self.gauge("pool_available_bytes", help, s.available_bytes);
        let help = "Shortage of memory: 0 none, 1 creates wait, 2 sandboxes that grow are stopped";
        self.gauge("pool_pressure", help, s.pressure);
        let help = "Sandboxes that are stopped until the host has memory";
        self.gauge("pool_stopped", help, s.stopped);
        let help = "Installed templates and older versions of them that are in use";
        self.gauge("pool_images", help, s.images);
        self.vmms(s);
        self.installed(s);
        self.stocks(s);
        let help = "Creates served by a warm slot";
        self.counter("pool_warm_hits", help, s.warm_hits);
        let help = "Creates that had to restore a new VM";
        self.counter("pool_warm_misses", help, s.warm_misses);
        let help = "Creates refused for lack of resources";
        self.counter("pool_refused", help, s.refused);
        let help = "Creates refused for lack of memory";
        self.counter("pool_refused_for_memory", help, s.refused_for_memory);
        let help = "Resumes by traffic that waited for room";
        self.counter("pool_wakes_waited", help, s.wakes_waited);
        self.counter("pool_died", "VMs that ended unexpectedly", s.died);
        let help = "Installed templates that were rebuilt";
        self.counter("pool_rebuilds", help, s.rebuilt);
        let help = "Rebuilds of installed templates that failed";
        self.counter("pool_rebuilds_failed", help, s.rebuilds_failed);
        self.network(&s.network);
        let failed = s.failed.iter();
        let failed = failed.map(|(what, count)| (vec![("what", (*what).to_owned())], *count));
        self.counters("pool_failed", "Failed starts by failed step", failed);
    }

    /// Adds the uses of each kept VMM. After a fix of the VMM, the samples with `present="false"` show what still uses an
    /// older one.
    fn vmms(&mut self, stats: &PoolStats) {
        let uses = stats.vmms.iter().flat_map(|(id, uses)| {
            let counts = [
                ("running", uses.running),
                ("paused", uses.paused),
                ("templates", uses.templates),
            ];
            counts.map(|(kind, count)| {
                let labels = vec![
                    ("vmm", id.as_str()[..12].to_owned()),
                    ("present", uses.is_present.to_string()),
                    ("use", kind.to_owned()),
                ];
                (labels, u64::from(count))
            })
        });
        let help = "VMs, pauses and templates of each cube-vmm, named by the start of its SHA-256";
        self.gauges("pool_vmm_uses", help, uses);
    }

    /// Adds the VMM of each installed template, and whether the template is being rebuilt with the current one. The
    /// operator chooses the names of installed templates.
    fn installed(&mut self, stats: &PoolStats) {
        let states = stats.installed.iter().flat_map(|(name, template)| {
            RebuildState::ALL.map(|state| {
                let labels = vec![
                    ("template", name.clone()),
                    ("vmm", template.vmm.as_str()[..12].to_owned()),
                    ("state", state.name().to_owned()),
                ];
                (labels, u64::from(template.state == state))
            })
        });
        let help = "Installed templates: 1 for the state of each";
        self.gauges("pool_installed_template", help, states);
    }

    /// Adds the warm stock of each template that has been used, has warm slots, or is loaded. The pool checks names:
    /// they contain no character that must be escaped.
    fn stocks(&mut self, stats: &PoolStats) {
        let each = |field: fn(&StockStats) -> u64| -> Vec<(Labels, u64)> {
            let stocks = stats.stocks.iter();
            let sample = |(name, stock): (&String, &StockStats)| {
                (vec![("template", name.clone())], field(stock))
            };
            stocks.map(sample).collect()
        };
        let wanted = each(|stock| stock.wanted.into());
        let help = "Warm slots by configuration and demand, of each template in use";
        self.gauges("pool_template_wanted", help, wanted);
        let target = each(|stock| stock.target.into());
        let help = "Warm slots up to which the stock is filled, of each template in use";
        self.gauges("pool_template_target", help, target);
        let warm = each(|stock| stock.warm.into());
        let help = "Warm slots, of each template in use";
        self.gauges("pool_template_warm", help, warm);
        let loaded = each(|stock| stock.is_loaded.into());
        let help = "1 if the template's memory is loaded, of each template in use";
        self.gauges("pool_template_loaded", help, loaded);
        let help = "Creates served by a warm slot, of each template in use";
        self.counters("pool_template_hits", help, each(|stock| stock.hits));
        let help = "Creates that had to restore a new VM, of each template in use";
        self.counters("pool_template_misses", help, each(|stock| stock.misses));
    }

    /// Adds the traffic of all sandboxes, including ended ones, since the eBPF programs were loaded.
    fn network(&mut self, network: &Counters) {
        let both = |out: u64, back: u64| {
            [("out", out), ("in", back)]
                .map(|(direction, count)| (vec![("direction", direction.to_owned())], count))
        };
        let packets = both(network.packets_out, network.packets_in);
        let help = "Packets that passed, from sandboxes and to them";
        self.counters("network_packets", help, packets);
        let bytes = both(network.bytes_out, network.bytes_in);
        let help = "Bytes that passed, from sandboxes and to them";
        self.counters("network_bytes", help, bytes);
        self.counter("network_flows", "Flows started by sandboxes", network.flows);
        let help = "Refused packets whose record was lost";
        self.counter("network_events_lost", help, network.events_lost);
        let refused = network.refused.iter();
        let refused = refused.map(|(why, count)| (vec![("reason", name_of_reason(*why))], *count));
        self.counters("network_refused", "Packets refused, by reason", refused);
    }
}
