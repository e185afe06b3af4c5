//! Nodes of a cluster that the run started, used in turn, and the events that hit one of them ([`events`]).

mod events;

use std::io;

use model::Timeline;

use super::{CloneId, PageCache, Sandbox, Target, e2b::E2b};
use crate::event::Failure;

pub use events::{Scene, Stage};

/// The same service at several addresses.
#[derive(Debug)]
pub struct Nodes {
    /// All nodes: each must be ready before a round.
    pub all: Vec<E2b>,
    /// Positions of the nodes that receive requests; not empty.
    pub asked: Vec<usize>,
}

impl Target for Nodes {
    fn create(&self, id: CloneId, timeline: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure> {
        let arrival = usize::try_from(id.arrival).unwrap_or(0);
        let at = self.asked[arrival % self.asked.len()];
        self.all[at].create(id, timeline)
    }

    fn prepare_cache(&self, _: PageCache) -> io::Result<()> {
        // Each node decides how it maps its templates.
        Ok(())
    }

    fn await_ready(&self) -> io::Result<()> {
        self.all.iter().try_for_each(E2b::await_ready)
    }
}
