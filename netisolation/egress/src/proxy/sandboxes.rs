//! Connection limits, for each sandbox and in total, and closing all connections of a sandbox.
//!
//! At the total limit, the sandbox with the most connections makes room: its longest-idle connection is closed. A
//! sandbox with few connections thus always gets a place, however many the others hold.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::sync::{Notify, watch};

use super::{Settings, stream::Activity};

/// Idle entries are removed when there are more than this.
const PRUNE_ABOVE: usize = 1024;
/// A connection that has passed a byte within this time is in use. A sandbox that already has the most connections
/// cannot displace one that is in use.
const IN_USE: Duration = Duration::from_secs(1);

/// The sandboxes with connections, by id.
pub(crate) struct Sandboxes {
    settings: Settings,
    entries: Mutex<HashMap<String, Arc<Sandbox>>>,
    /// Connections of all sandboxes. Only [`Sandboxes::join`] adds to it.
    all: Arc<AtomicUsize>,
}

struct Sandbox {
    state: Mutex<State>,
    cut: watch::Sender<()>,
}

struct State {
    places: Vec<Arc<Place>>,
    budget: Budget,
}

/// The resources of a connection.
pub(crate) struct Place {
    activity: Arc<Activity>,
    closed: Notify,
}

/// A token bucket for requests.
struct Budget {
    requests: f64,
    filled: Instant,
}

/// Counts as a connection of the sandbox until it is dropped.
pub(crate) struct Membership {
    sandbox: Arc<Sandbox>,
    settings: Settings,
    cut: watch::Receiver<()>,
    place: Arc<Place>,
    all: Arc<AtomicUsize>,
}

/// Reason why a connection gets no place. The texts appear in records.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Full {
    #[error("the sandbox has too many connections")]
    Sandbox,
    #[error(
        "the proxy has too many connections, and no sandbox has more of them than this one: raise egress.connections"
    )]
    All,
}

impl Sandboxes {
    pub(crate) fn new(settings: Settings) -> Self {
        let entries = Mutex::new(HashMap::new());
        Self {
            settings,
            entries,
            all: Arc::default(),
        }
    }

    /// Counts a connection. A later [`Sandboxes::cut`] ends it.
    pub(crate) fn join(&self, id: &str) -> Result<Membership, Full> {
        self.join_at(id, Instant::now())
    }

    fn join_at(&self, id: &str, now: Instant) -> Result<Membership, Full> {
        let mut entries = lock(&self.entries);
        if entries.len() > PRUNE_ABOVE {
            entries.retain(|_, sandbox| !sandbox.is_unused(&self.settings));
        }
        let sandbox = entries.entry(id.to_owned());
        let sandbox = sandbox.or_insert_with(|| Arc::new(Sandbox::new(&self.settings)));
        let sandbox = Arc::clone(sandbox);
        if sandbox.count() >= self.settings.sandbox_connections as usize {
            return Err(Full::Sandbox);
        }
        if self.all.load(Ordering::Relaxed) >= self.settings.connections as usize {
            self.make_room(&entries, &sandbox, now)?;
        }
        self.all.fetch_add(1, Ordering::Relaxed);
        let place = Arc::new(Place {
            activity: Activity::new(),
            closed: Notify::new(),
        });
        lock(&sandbox.state).places.push(Arc::clone(&place));
        Ok(Membership {
            settings: self.settings,
            cut: sandbox.cut.subscribe(),
            place,
            all: Arc::clone(&self.all),
            sandbox,
        })
    }

    /// Closes the longest-idle connection of the sandbox with the most connections, counting the new one.
    fn make_room(
        &self,
        entries: &HashMap<String, Arc<Sandbox>>,
        newcomer: &Arc<Sandbox>,
        now: Instant,
    ) -> Result<(), Full> {
        let load =
            |sandbox: &Arc<Sandbox>| sandbox.count() + usize::from(Arc::ptr_eq(sandbox, newcomer));
        let most = entries.values().map(load).max().unwrap_or(0);
        let largest = entries.values().filter(|sandbox| load(sandbox) == most);
        let idle = largest.filter_map(|sandbox| Some((sandbox.longest_idle(now)?, sandbox)));
        let ((idle, place), sandbox) = idle.max_by_key(|((idle, _), _)| *idle).ok_or(Full::All)?;
        if load(newcomer) == most && idle < IN_USE {
            return Err(Full::All);
        }
        if sandbox.leave(&place) {
            self.all.fetch_sub(1, Ordering::Relaxed);
        }
        place.closed.notify_one();
        Ok(())
    }

    /// Ends all connections of the sandbox. Its request budget is kept.
    pub(crate) fn cut(&self, id: &str) {
        if let Some(sandbox) = lock(&self.entries).get(id) {
            sandbox.cut.send_replace(());
        }
    }
}

impl Sandbox {
    fn new(settings: &Settings) -> Self {
        let budget = Budget {
            requests: burst(settings),
            filled: Instant::now(),
        };
        let places = Vec::new();
        Self {
            state: Mutex::new(State { places, budget }),
            cut: watch::Sender::new(()),
        }
    }

    fn count(&self) -> usize {
        lock(&self.state).places.len()
    }

    /// `None` if it has no connection.
    fn longest_idle(&self, now: Instant) -> Option<(Duration, Arc<Place>)> {
        let state = lock(&self.state);
        let idle = state
            .places
            .iter()
            .map(|place| (place.activity.idle_at(now), place));
        let (idle, place) = idle.max_by_key(|(idle, _)| *idle)?;
        Some((idle, Arc::clone(place)))
    }

    /// Removes a place. Returns whether the sandbox still had it.
    fn leave(&self, place: &Arc<Place>) -> bool {
        let mut state = lock(&self.state);
        let at = state
            .places
            .iter()
            .position(|other| Arc::ptr_eq(other, place));
        at.map(|at| state.places.swap_remove(at)).is_some()
    }

    fn is_unused(&self, settings: &Settings) -> bool {
        let mut state = lock(&self.state);
        state.budget.fill(settings);
        state.places.is_empty() && state.budget.requests >= burst(settings)
    }
}

impl Place {
    /// Waits until another connection needs the place.
    pub(crate) async fn closed(&self) {
        self.closed.notified().await;
    }
}

impl Membership {
    /// Counts a request.
    pub(crate) fn take_request(&self) -> bool {
        lock(&self.sandbox.state).budget.take(&self.settings)
    }

    pub(crate) fn place(&self) -> Arc<Place> {
        Arc::clone(&self.place)
    }

    /// The connection's activity. A connection without activity is the first to be closed at the total limit.
    pub(crate) fn activity(&self) -> Arc<Activity> {
        Arc::clone(&self.place.activity)
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
        if self.sandbox.leave(&self.place) {
            self.all.fetch_sub(1, Ordering::Relaxed);
        }
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
        // The budget belongs to the sandbox, not to its connections.
        let third = sandboxes.join("a").ok().unwrap();
        assert!(!third.take_request());
    }

    /// Whether the place of a connection was taken.
    async fn is_closed(member: &Membership) -> bool {
        tokio::select! {
            biased;
            () = member.place.closed() => true,
            () = tokio::task::yield_now() => false,
        }
    }

    #[tokio::test]
    async fn at_the_limit_for_all_the_sandbox_with_most_connections_makes_room() {
        let sandboxes = Sandboxes::new(Settings {
            connections: 4,
            sandbox_connections: 4,
            ..SETTINGS
        });
        let small = sandboxes.join("small").ok().unwrap();
        let large: Vec<_> = (0..3).map(|_| sandboxes.join("large").unwrap()).collect();
        let now = Instant::now() + IN_USE / 100;
        // `small` has been idle for longest, but has fewer connections.
        for member in [&large[0], &large[2]] {
            while member.activity().idle_at(now) >= large[1].activity().idle_at(now) {
                member.activity().touch();
                std::thread::yield_now();
            }
        }
        // All of its own are in use, and no sandbox has more.
        assert_eq!(sandboxes.join_at("large", now).err(), Some(Full::All));
        let new = sandboxes.join_at("new", now).ok().unwrap();
        assert!(is_closed(&large[1]).await);
        for other in [&small, &large[0], &large[2], &new] {
            assert!(!is_closed(other).await);
        }
        assert_eq!(sandboxes.all.load(Ordering::Relaxed), 4);
        // A connection that was already closed does not free its place twice.
        drop(large);
        assert_eq!(sandboxes.all.load(Ordering::Relaxed), 2);
        // A sandbox with the most connections displaces its own when it is not in use.
        let mut own: Vec<_> = (0..2).map(|_| sandboxes.join("own").unwrap()).collect();
        let later = Instant::now() + IN_USE;
        own.push(sandboxes.join_at("own", later).unwrap());
        let closed = [is_closed(&own[0]).await, is_closed(&own[1]).await];
        assert_eq!(closed.iter().filter(|closed| **closed).count(), 1);
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
        // A connection made after the cut is not affected by it.
        let later = sandboxes.join("a").ok().unwrap();
        tokio::select! {
            biased;
            () = later.cut() => panic!("a later connection was cut"),
            () = tokio::task::yield_now() => {}
        }
    }
}
