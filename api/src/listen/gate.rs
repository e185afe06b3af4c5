//! The gate between connections and the backend. A handover closes it: requests in progress finish, and later ones
//! wait. When the gate opens again, they go to the same backend, a new one, or a successor.
//!
//! Two kinds of requests pass separately. Requests to the control plane change sandboxes, which takes up to seconds.
//! They wait from the start of a handover. Traffic needs the gate only while a sandbox's route is looked up. It
//! continues while the changes finish, and waits only during the moment in which the pool has no owner. No request
//! waits longer than the handover's deadlines. The limits of connections and streams bound the number of waiting
//! requests.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

use super::dispatch::Backend;

/// Where requests go.
#[derive(Debug)]
pub enum Recipient<R> {
    Backend(Arc<Backend<R>>),
    /// The process behind the internal socket at this path.
    Successor(PathBuf),
}

impl<R> Clone for Recipient<R> {
    fn clone(&self) -> Self {
        match self {
            Self::Backend(backend) => Self::Backend(Arc::clone(backend)),
            Self::Successor(path) => Self::Successor(path.clone()),
        }
    }
}

/// Both locks are fair: a closing gate waits for requests that have already passed, and later requests wait for the
/// gate.
#[derive(Debug)]
pub struct Gate<R> {
    control: Arc<RwLock<()>>,
    recipient: Arc<RwLock<Recipient<R>>>,
}

impl<R> Clone for Gate<R> {
    fn clone(&self) -> Self {
        Self {
            control: Arc::clone(&self.control),
            recipient: Arc::clone(&self.recipient),
        }
    }
}

/// The part of the gate that a request passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passage {
    Control,
    Traffic,
}

/// Keeps the gate from closing while it exists.
#[derive(Debug)]
pub(super) enum Ticket<R> {
    Control {
        _held: OwnedRwLockReadGuard<()>,
    },
    Traffic {
        _held: OwnedRwLockReadGuard<Recipient<R>>,
    },
}

impl<R> Gate<R> {
    pub(super) fn new(backend: Backend<R>) -> Self {
        Self {
            control: Arc::default(),
            recipient: Arc::new(RwLock::new(Recipient::Backend(Arc::new(backend)))),
        }
    }

    pub(super) async fn pass(&self, passage: Passage) -> (Recipient<R>, Ticket<R>) {
        match passage {
            // Release the recipient's lock here: a handover takes it while requests wait for the control lock.
            Passage::Control => {
                let _held = Arc::clone(&self.control).read_owned().await;
                let recipient = self.recipient.read().await.clone();
                (recipient, Ticket::Control { _held })
            }
            Passage::Traffic => {
                let _held = Arc::clone(&self.recipient).read_owned().await;
                (_held.clone(), Ticket::Traffic { _held })
            }
        }
    }

    /// Waits until no request to the control plane is in progress. Later ones wait until the guard is dropped.
    pub async fn close_control(&self) -> OwnedRwLockWriteGuard<()> {
        Arc::clone(&self.control).write_owned().await
    }

    /// Waits until no route is being looked up. Traffic waits until the guard is dropped; the guard's value is then the
    /// recipient of all requests.
    pub async fn close_traffic(&self) -> OwnedRwLockWriteGuard<Recipient<R>> {
        Arc::clone(&self.recipient).write_owned().await
    }
}
