//! Templates that no caller uses any more: they lose their warm slots, and their memory is unloaded.

use tokio::task::spawn_blocking;

use super::Driver;
use crate::{
    host, policy,
    templates::{Memory, Template},
};

impl Driver {
    /// Retires the templates that are not installed and have not been used for a while.
    pub(super) fn retire_idle(&mut self) {
        let now_ns = host::monotonic_ns();
        let idle = self.config.idle;
        let is_idle = |t: &&Template| {
            // A template that is being loaded is retired when that has ended.
            let is_loading = matches!(t.memory, Memory::Loading);
            t.wanted
                && t.rebuild.is_none()
                && !is_loading
                && policy::is_idle(t.used_ns, now_ns, idle)
        };
        let idle = self.templates.iter().filter(is_idle);
        let idle: Vec<_> = idle.map(|t| t.info.id.clone()).collect();
        for id in idle {
            self.retire(&id);
        }
    }

    fn retire(&mut self, id: &str) {
        let Some(template) = self.templates.get_mut(id) else {
            return;
        };
        tracing::info!(template = id, "not in use any more: ending its warm slots");
        (template.wanted, template.refilling) = (false, false);
        let is_loaded = matches!(template.memory, Memory::Loaded(_));
        let loaded = is_loaded.then(|| std::mem::replace(&mut template.memory, Memory::OnDisk));
        self.end_stock(id);
        // Freeing huge pages takes time.
        drop(spawn_blocking(move || drop(loaded)));
    }
}
