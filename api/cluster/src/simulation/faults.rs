//! Client operations and faults.

use model::SandboxId;

use crate::{NodeState, Route, place};

use super::{
    server::{Note, needs},
    world::{Event, HOSTS, Message, World},
};

impl World {
    pub(super) fn client(&mut self) {
        if !self.in_trouble() {
            return;
        }
        let pause = 100 + self.draw(1500);
        self.later(pause, Event::Client);
        let front = self.draw(HOSTS as u64);
        let front = usize::try_from(front).unwrap_or(0);
        if self.hosts[front].process.is_none() || self.hosts[front].stopped_until > self.now {
            return;
        }
        if self.draw(10) == 0 {
            self.build();
        }
        if self.draw(3) == 0 {
            self.ask_for_one(front);
        } else {
            self.ask_about_one(front);
        }
    }

    fn ask_for_one(&mut self, front: usize) {
        let Some(view) = self.view(front) else {
            return;
        };
        let mut needs = needs(self.hosts[front].id());
        needs.except.clear();
        let random = self.draw(u64::MAX);
        let order = place(&view, &needs, |_| 0, random);
        let Some(first) = order.first() else {
            return;
        };
        let node = first.node.clone();
        let mut id_bytes = [0; 14];
        for byte in &mut id_bytes {
            *byte = u8::try_from(self.draw(252)).unwrap_or(0);
        }
        self.tell(front, &node, Message::Create { id_bytes });
    }

    fn ask_about_one(&mut self, front: usize) {
        let known: Vec<SandboxId> = self.truths.keys().cloned().collect();
        let pick = usize::try_from(self.draw(known.len() as u64)).unwrap_or(0);
        let (Some(id), Some(view)) = (known.get(pick), self.view(front)) else {
            return;
        };
        let at = match view.route(id, &self.home_key) {
            Route::Here => front,
            Route::Node { node, .. } => match self.at(&node) {
                Some(at) if !self.cut.contains(&(front, at)) => at,
                _ => return,
            },
            Route::Away { .. } | Route::Unknown => return,
        };
        if self.hosts[at].stopped_until > self.now {
            return;
        }
        let choice = self.draw(10);
        let Some(process) = self.hosts[at].process.as_mut() else {
            return;
        };
        match choice {
            0 => self.client_kill(at, id),
            1..=4 => self.client_pause(at, id),
            _ => drop(process.wanted.insert(id.clone())),
        }
    }

    pub(super) fn fault(&mut self) {
        if !self.in_trouble() {
            self.repair();
            return;
        }
        let pause = 500 + self.draw(9000);
        self.later(pause, Event::Fault);
        let at = usize::try_from(self.draw(HOSTS as u64)).unwrap_or(0);
        match self.draw(16) {
            0 | 1 => {
                self.hosts[at].etcd_cut = true;
                self.break_watch(at);
                let delay = self.draw(30_000);
                self.later(delay, Event::Heal { host: at });
            }
            2 => self.crash(at),
            3 => self.reboot(at),
            4 => {
                self.summary.stops += 1;
                self.hosts[at].stopped_until = self.now + self.draw(25_000);
            }
            5 => {
                self.etcd_up = false;
                self.break_watches();
                let delay = 500 + self.draw(20_000);
                self.later(delay, Event::EtcdUp);
            }
            6 | 7 => {
                self.summary.compactions += 1;
                self.etcd.compact();
                self.break_watch(at);
            }
            8 => self.backup = Some(self.etcd.clone()),
            9 if self.has_lists && self.draw(3) == 0 => self.restore(),
            10 => {
                let other = (at + 1) % HOSTS;
                self.cut.extend([(at, other), (other, at)]);
                let delay = self.draw(20_000);
                self.later(delay, Event::HealPair { a: at, b: other });
            }
            11 => self.hosts[at].clock_offset += self.draw(60_000),
            12 => self.break_watch(at),
            13 => {
                let id = self.hosts[at].id().clone();
                self.set_state(&id, NodeState::Ready);
            }
            14 => {
                let id = self.hosts[at].id().clone();
                self.set_state(&id, NodeState::Draining);
            }
            _ => self.turn_template(at),
        }
    }

    fn crash(&mut self, at: usize) {
        self.summary.crashes += 1;
        self.hosts[at].process = None;
        self.hosts[at].stopped_until = 0;
        let delay = 100 + self.draw(20_000);
        self.later(delay, Event::Start { host: at });
    }

    /// Reboots a host. Its VMs end, and with them its running sandboxes.
    fn reboot(&mut self, at: usize) {
        self.crash(at);
        let host = &mut self.hosts[at];
        host.boots += 1;
        host.node.incarnation = format!("{:x}", host.boots).parse().unwrap();
        let ran: Vec<SandboxId> = std::mem::take(&mut host.vms).into_iter().collect();
        for id in ran {
            if let Some(local) = host.disk.get_mut(&id) {
                local.note = Note::Ending;
                if local.owned.is_none() {
                    host.disk.remove(&id);
                }
            }
            if let Some(truth) = self.truths.get_mut(&id) {
                truth.lost = true;
            }
        }
    }

    fn restore(&mut self) {
        let Some(backup) = self.backup.take() else {
            return;
        };
        self.summary.restores += 1;
        self.etcd.restore(&backup, self.now);
        self.break_watches();
    }

    fn turn_template(&mut self, at: usize) {
        let has = !self.hosts[at].has_template;
        self.hosts[at].has_template = has;
        self.publish(at);
    }

    /// Ends all faults. Recovery must then complete without help.
    fn repair(&mut self) {
        self.note(|| "all faults end".to_owned());
        self.cut.clear();
        self.etcd_up = true;
        let ready = self.hosts[0].id().clone();
        self.set_state(&ready, NodeState::Ready);
        for at in 0..HOSTS {
            self.hosts[at].etcd_cut = false;
            self.hosts[at].stopped_until = 0;
            self.later(0, Event::Start { host: at });
            if !self.hosts[at].has_template {
                self.turn_template(at);
            }
        }
    }
}
