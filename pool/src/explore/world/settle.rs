//! The driver's work after each event: waiting requests, the queue, the warm stock.

use std::time::Duration;

use super::{PLACES, Place, Violation, World, violated};
use crate::{
    policy::{
        Demand, Foreground, Placement, Places, Room, Space, StartFor, Stock, may_fill, place,
        refilling,
    },
    slot::{Event, FailedBy, Slot, Stage},
};

impl World {
    pub(super) fn settle(&mut self) -> Result<(), Violation> {
        for at in 0..self.places.len() {
            if let Some(request) = self.places[at].waiting.take() {
                self.request(at, request)?;
            }
        }
        for at in 0..self.places.len() {
            if let Some(Stage::ResumeQueued(_)) = self.places[at].stage() {
                match self.placement(StartFor::Resume) {
                    _ if self.closing => self.apply(at, Event::ResumeFailed(FailedBy::Host))?,
                    Placement::Start => self.apply(at, Event::Resume)?,
                    Placement::Evict => self.evict()?,
                    Placement::Refuse(_) => self.apply(at, Event::ResumeFailed(FailedBy::Host))?,
                    Placement::Wait => {}
                    Placement::Take => return violated("a resume takes no warm slot"),
                }
            }
        }
        if self.closing {
            self.queued = 0;
            return Ok(());
        }
        for _ in 0..self.queued {
            match self.placement(StartFor::Create) {
                Placement::Take => {
                    let Some(at) = self.warm() else {
                        return violated("a create takes a warm slot");
                    };
                    self.apply(at, Event::Lease)?;
                    self.places[at].serves_create = true;
                }
                Placement::Start => {
                    let mut place = Place::new(Stage::Starting, self.lifetime);
                    place.leases = 1;
                    place.serves_create = true;
                    self.places.push(place);
                }
                Placement::Evict => {
                    self.evict()?;
                    continue;
                }
                Placement::Wait => continue,
                Placement::Refuse(_) => {}
            }
            self.queued -= 1;
        }
        self.fill();
        Ok(())
    }

    pub(super) fn warm(&self) -> Option<usize> {
        let mut places = self.places.iter();
        places.position(|place| place.stage() == Some(Stage::Warm))
    }

    fn evict(&mut self) -> Result<(), Violation> {
        match self.warm() {
            Some(at) => self.apply(at, Event::Kill),
            None => violated("a warm slot is evicted"),
        }
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.places.iter().filter_map(|place| place.slot.as_ref())
    }

    pub(super) fn count(&self, wanted: impl Fn(&&Slot) -> bool) -> u32 {
        u32::try_from(self.slots().filter(wanted).count()).unwrap_or(u32::MAX)
    }

    pub(super) fn room(&self) -> Room {
        let plenty = Space {
            available: 1 << 40,
            ..Space::default()
        };
        Room {
            available: 1 << 40,
            expected: 1 << 20,
            slots: self.count(|slot| slot.takes_memory()),
            max: self.bounds.max,
            disk: plenty,
            ..Room::default()
        }
    }

    fn placement(&self, start: StartFor) -> Placement {
        let is_resume = start != StartFor::Create;
        let mut places = Places {
            all: PLACES,
            ..Places::default()
        };
        for slot in self.slots().filter(|slot| !slot.vm) {
            match slot.stage {
                Stage::Starting => places.hold(StartFor::Create),
                Stage::Resuming(_) => places.hold(StartFor::Resume),
                _ => {}
            }
        }
        let demand = Demand {
            warm: self.warm().is_some() && !is_resume,
            has_layer: is_resume,
            other_warm: self.warm().is_some(),
            ending: self.count(|slot| slot.stage == Stage::Ending && slot.vm) > 0,
            place: places.has_one_for(start),
        };
        place(&self.room(), &demand)
    }

    /// Begins fills of the stock.
    fn fill(&mut self) {
        let stock = Stock {
            warm: self.count(|slot| slot.stage == Stage::Warm),
            filling: self.count(|slot| slot.stage == Stage::Filling),
            low: self.bounds.warm,
            high: self.bounds.warm,
            refilling: self.refilling,
        };
        self.refilling = refilling(&stock);
        let foreground = Foreground {
            waiting: self.queued > 0,
            busy_for: Duration::ZERO,
            since_fill: Duration::ZERO,
            filling: stock.filling,
            max_filling: 1,
        };
        if self.refilling && self.room().fits_fill() && may_fill(&foreground) {
            self.places.push(Place::new(Stage::Filling, self.lifetime));
        }
    }
}
