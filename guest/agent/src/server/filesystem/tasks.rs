//! Work on whole trees, done in turns, so that other requests are served in between. It is abandoned when its caller
//! disconnects.

use std::path::{Path, PathBuf};

use envd::{ConnectError, ListDirResponse};
use transport::{Exchange, Gone, Key, Step};

use super::{
    super::{
        call,
        core::{Conn, Core},
        message,
    },
    list::Listing,
    remove::Removal,
};
use crate::users::UserDb;

/// Entries listed or removed in one turn.
const TURN: usize = 64;

/// Long work that ends with a response.
pub(crate) enum Task {
    List(Listing),
    Remove(Removal),
}

impl Task {
    pub(super) fn list(path: PathBuf, depth: u32) -> Result<Self, ConnectError> {
        Listing::open(path, depth).map(Self::List)
    }

    pub(super) fn remove(path: &Path) -> Result<Self, ConnectError> {
        Removal::open(path).map(Self::Remove)
    }

    /// Does one turn. Returns the response once the work is done.
    fn turn(&mut self, users: &mut UserDb) -> Result<Option<Vec<u8>>, ConnectError> {
        match self {
            Self::List(listing) => match listing.turn(TURN, users)? {
                Some(entries) => message::write(&ListDirResponse { entries }).map(Some),
                None => Ok(None),
            },
            Self::Remove(removal) => Ok(removal.turn(TURN)?.then(|| b"{}".to_vec())),
        }
    }
}

impl Exchange<Core> for Task {
    fn step(&mut self, core: &mut Core, _: Key, conn: &mut Conn) -> Result<Step, Gone> {
        if conn.hangup {
            return Err(Gone);
        }
        let done = self.turn(&mut core.users);
        call::end_unary(conn, done);
        Ok(Step::Again)
    }
}
