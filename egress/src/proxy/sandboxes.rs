//! Limits by sandbox, and the end of all its connections at once.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use tokio::sync::watch;

use super::Settings;

/// Idle entries are removed when there are more than this.
const PRUNE_ABOVE: usize = 1024;

/// The sandboxes with connections, by id.
pub(crate) struct Sandboxes {
    settings: Settings,
    entries: Mutex<HashMap<String, Arc<Sandbox>>>,
}

struct Sandbox {
    state: Mutex<State>,
    cut: watch::Sender<()>,
}

struct State {
    connections: u32,
    budget: Budget,
}

/// A bucket of requests.
struct Budget {
    requests: f64,
    filled: Instant,
}

/// One connection of a sandbox, until it is dropped.
pub(crate) struct Membership {
    sandbox: Arc<Sandbox>,
    settings: Settings,
    cut: watch::Receiver<()>,
}

/// The sandbox has as many connections as it may.
#[derive(Debug)]
pub(crate) struct Full;

impl Sandboxes {
    pub(crate) fn new(settings: Settings) -> Self {
        let entries = Mutex::new(HashMap::new());
        Self { settings, entries }
    }

    /// Counts a connection. A later [`Sandboxes::cut`] ends it.
    pub(crate) fn join(&self, id: &str) -> Result<Membership, Full> {
        let mut entries = lock(&self.entries);
        if entries.len() > PRUNE_ABOVE {
            entries.retain(|_, sandbox| !sandbox.is_idle(&self.settings));
        }
        let sandbox = entries.entry(id.to_owned()).or_insert_with(|| {
            let budget = Budget {
                requests: burst(&self.settings),
                filled: Instant::now(),
            };
            let state = State {
                connections: 0,
                budget,
            };
            Arc::new(Sandbox {
                state: Mutex::new(state),
                cut: watch::Sender::new(()),
            })
        });
        let mut state = lock(&sandbox.state);
        if state.connections >= self.settings.sandbox_connections {
            return Err(Full);
        }
        state.connections += 1;
        drop(state);
        Ok(Membership {
            sandbox: Arc::clone(sandbox),
            settings: self.settings,
            cut: sandbox.cut.subscribe(),
        })
    }

    /// Ends all connections of the sandbox. Its budget of requests stays.
    pub(crate) fn cut(&self, id: &str) {
        if let Some(sandbox) = lock(&self.entries).get(id) {
            sandbox.cut.send_replace(());
        }
    }
}

impl Sandbox {
    fn is_idle(&self, settings: &Settings) -> bool {
        let mut state = lock(&self.state);
        state.budget.fill(settings);
        state.connections == 0 && state.budget.requests >= burst(settings)
    }
}

impl Membership {
    /// Counts a request.
    pub(crate) fn take_request(&self) -> bool {
        lock(&self.sandbox.state).budget.take(&self.settings)
    }

    /// Waits until the sandbox is cut.
    pub(crate) fn cut(&self) -> impl Future<Output = ()> + use<> {
        let mut cut = self.cut.clone();
        async move {
            // The sender lives as long as this membership's sandbox.
            let _ = cut.changed().await;
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let mut state = lock(&self.sandbox.state);
        state.connections = state.connections.saturating_sub(1);
    }
}

impl Budget {
    fn take(&mut self, settings: &Settings) -> bool {
        self.fill(settings);
        let is_enough = self.requests >= 1.0;
        if is_enough {
            self.requests -= 1.0;
        }
        is_enough
    }

    fn fill(&mut self, settings: &Settings) {
        let now = Instant::now();
        let passed = now.duration_since(self.filled).as_secs_f64();
        self.filled = now;
        let filled = self.requests + passed * f64::from(settings.sandbox_requests);
        self.requests = filled.min(burst(settings));
    }
}

fn burst(settings: &Settings) -> f64 {
    2.0 * f64::from(settings.sandbox_requests)
}

/// No code panics while it holds one of these locks, so a poisoned one is intact.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: Settings = Settings {
        https_port: 443,
        connections: 10,
        sandbox_connections: 2,
        sandbox_requests: 5,
    };

    #[test]
    fn connections_and_requests_are_counted_by_sandbox() {
        let sandboxes = Sandboxes::new(SETTINGS);
        let first = sandboxes.join("a").ok().unwrap();
        let second = sandboxes.join("a").ok().unwrap();
        assert!(sandboxes.join("a").is_err());
        let other = sandboxes.join("b").ok().unwrap();
        let taken = (0..20).filter(|_| first.take_request()).count();
        assert!((10..12).contains(&taken), "{taken}");
        assert!(!second.take_request());
        assert!(other.take_request());
        drop(first);
        // The budget is the sandbox's, whatever its connections.
        let third = sandboxes.join("a").ok().unwrap();
        assert!(!third.take_request());
    }

    #[tokio::test]
    async fn a_cut_ends_the_connections_of_one_sandbox() {
        let sandboxes = Sandboxes::new(SETTINGS);
        let own = sandboxes.join("a").ok().unwrap();
        let other = sandboxes.join("b").ok().unwrap();
        sandboxes.cut("a");
        own.cut().await;
        tokio::select! {
            biased;
            () = other.cut() => panic!("the other sandbox was cut"),
            () = tokio::task::yield_now() => {}
        }
        // A connection of after the cut is not ended by it.
        let later = sandboxes.join("a").ok().unwrap();
        tokio::select! {
            biased;
            () = later.cut() => panic!("a later connection was cut"),
            () = tokio::task::yield_now() => {}
        }
    }
}
