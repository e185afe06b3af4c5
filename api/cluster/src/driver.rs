//! Runs a server's [`Engine`]: one task owns it, and each request and the watch have their own task.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{broadcast, mpsc, oneshot, watch},
    task::JoinHandle,
    time::{MissedTickBehavior, interval},
};

use crate::{
    ClusterEvent, Load, NodeId, View,
    engine::{Effect, Engine, Input, Standing, Timing},
    etcd::Etcd,
    store::{LeaseId, Watched},
};

/// Messages from handles to the task.
#[derive(Debug)]
pub(crate) enum Order {
    Input(Input),
    /// Stop renewing. The response is the lease.
    Stop(oneshot::Sender<Option<LeaseId>>),
}

/// The task's status as last published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) standing: Standing,
    pub(crate) last_contact: Option<u64>,
    /// See [`Engine::renewed`].
    pub(crate) renewed: Option<u64>,
}

/// Number of creates sent to each node since its last load.
pub(crate) type Sent = Arc<Mutex<BTreeMap<NodeId, u32>>>;

pub(crate) struct Driver {
    pub(crate) engine: Engine,
    pub(crate) store: Arc<Etcd>,
    pub(crate) orders: mpsc::UnboundedReceiver<Order>,
    /// For responses. Weak, so that the task ends with the last handle.
    pub(crate) answers: mpsc::WeakUnboundedSender<Order>,
    pub(crate) load: watch::Receiver<Load>,
    pub(crate) views: watch::Sender<Arc<View>>,
    pub(crate) events: broadcast::Sender<ClusterEvent>,
    pub(crate) status: watch::Sender<Status>,
    pub(crate) sent: Sent,
}

/// The current watch.
struct Watching {
    generation: u64,
    reports: mpsc::Receiver<Watched>,
    task: JoinHandle<()>,
}

/// Reports of a watch that are queued for the engine. Further ones wait in the connection.
const REPORTS: usize = 64;

/// Milliseconds of CLOCK_BOOTTIME, which cannot be set and continues while the host is suspended.
pub(crate) fn now_ms() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME);
    let now = now.map_or(Duration::ZERO, Duration::from);
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

impl Driver {
    pub(crate) async fn run(mut self) {
        let mut ticks = interval(Duration::from_millis(Timing::TICK_MS));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut watching: Option<Watching> = None;
        loop {
            let input = tokio::select! {
                order = self.orders.recv() => match order {
                    Some(Order::Input(input)) => input,
                    Some(Order::Stop(reply)) => {
                        // The caller may have stopped waiting.
                        let _ = reply.send(self.engine.lease());
                        break;
                    }
                    None => break,
                },
                (generation, report) = next_report(&mut watching) => {
                    Input::Watched(generation, report)
                }
                _ = ticks.tick() => match self.load.has_changed() {
                    Ok(true) => Input::Load(self.load.borrow_and_update().clone()),
                    Ok(false) | Err(_) => Input::Tick,
                },
            };
            for effect in self.engine.step(now_ms(), input) {
                self.perform(effect, &mut watching);
            }
            self.publish_status();
        }
        if let Some(watching) = watching {
            watching.task.abort();
        }
    }

    fn perform(&self, effect: Effect, watching: &mut Option<Watching>) {
        match effect {
            Effect::Ask(token, request) => {
                let (store, answers) = (Arc::clone(&self.store), self.answers.clone());
                tokio::spawn(async move {
                    let answer = store.ask(request).await;
                    if let Some(answers) = answers.upgrade() {
                        // If the task has ended, nothing waits for the response.
                        let _ = answers.send(Order::Input(Input::Answer(token, answer)));
                    }
                });
            }
            Effect::Watch { generation, from } => {
                if let Some(before) = watching.take() {
                    before.task.abort();
                }
                let (sender, reports) = mpsc::channel(REPORTS);
                let store = Arc::clone(&self.store);
                let task = tokio::spawn(async move { store.watch(from, sender).await });
                *watching = Some(Watching {
                    generation,
                    reports,
                    task,
                });
            }
            Effect::View(view) => self.publish(view),
            Effect::Event(event) => {
                log(&event);
                // Fails only if there are no receivers.
                let _ = self.events.send(event);
            }
        }
    }

    fn publish(&self, view: View) {
        let before = self.views.send_replace(Arc::new(view));
        let after = self.views.borrow();
        if Arc::ptr_eq(&before.loads, &after.loads) {
            return;
        }
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        sent.retain(|node, _| before.loads.get(node) == after.loads.get(node));
    }

    fn publish_status(&self) {
        let status = Status {
            standing: self.engine.standing(),
            last_contact: self.engine.last_contact(),
            renewed: self.engine.renewed(),
        };
        self.status.send_if_modified(|before| {
            let is_new = *before != status;
            *before = status;
            is_new
        });
    }
}

/// The next report of the watch. Without a watch, waits for ever. A task that has died counts as a broken watch.
async fn next_report(watching: &mut Option<Watching>) -> (u64, Watched) {
    let Some(Watching {
        generation,
        reports,
        ..
    }) = watching
    else {
        return std::future::pending().await;
    };
    let generation = *generation;
    match reports.recv().await {
        Some(report) => (generation, report),
        None => {
            *watching = None;
            (generation, Watched::Broken)
        }
    }
}

fn log(event: &ClusterEvent) {
    match event {
        ClusterEvent::Joined(node) => tracing::info!(%node, "node is reachable"),
        ClusterEvent::Away { node } => {
            tracing::warn!(%node, "node is unreachable: its etcd lease has ended")
        }
        ClusterEvent::Rebooted(node) => {
            tracing::warn!(%node, "node was rebooted: sandboxes that ran there have ended");
        }
        ClusterEvent::Moved { sandbox, owner } => {
            let node = &owner.owner.node;
            tracing::info!(%sandbox, %node, epoch = owner.owner.epoch, "sandbox has moved");
        }
        ClusterEvent::Superseded { sandbox, by } => {
            let node = &by.owner.node;
            tracing::debug!(%sandbox, %node, epoch = by.owner.epoch, "sandbox belongs to another node");
        }
        ClusterEvent::Forgotten { sandbox } => {
            tracing::warn!(%sandbox, "etcd has lost the owner record of a paused sandbox");
        }
        ClusterEvent::Detached => {
            tracing::warn!("etcd does not respond: the last view stays in use")
        }
        ClusterEvent::Attached => tracing::info!("etcd responds again"),
        ClusterEvent::HistoryLost { had, found } => {
            tracing::error!(
                had,
                found,
                "etcd has an older state than before: owner records are written again"
            );
        }
    }
}
