//! Work on whole trees, done in turns: everybody else is served in between. It ends when its caller goes.

use std::path::{Path, PathBuf};

use api_types::envd::{ConnectError, ListDirResponse};

use super::{
    super::{
        Core,
        conn::{Conn, Gone, Phase},
        request::Step,
        rpc,
    },
    list::Listing,
    remove::Removal,
};
use crate::users::UserDb;

/// Things looked at or removed in one turn.
const TURN: usize = 64;

/// What a connection waits for.
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

    /// Goes on for one turn; the answer once it is done.
    fn turn(&mut self, users: &mut UserDb) -> Result<Option<Vec<u8>>, ConnectError> {
        match self {
            Self::List(listing) => match listing.turn(TURN, users)? {
                Some(entries) => rpc::json(&ListDirResponse { entries }).map(Some),
                None => Ok(None),
            },
            Self::Remove(removal) => Ok(removal.turn(TURN)?.then(|| b"{}".to_vec())),
        }
    }
}

/// Goes on with a connection's task.
#[inline(never)]
pub(crate) fn step(core: &mut Core, conn: &mut Conn) -> Result<Step, Gone> {
    if conn.hangup {
        return Err(Gone);
    }
    let Phase::Task(task) = &mut conn.phase else {
        return Ok(Step::Wait);
    };
    match task.turn(&mut core.users) {
        Ok(None) => {}
        Ok(Some(answer)) => rpc::answer(conn, &answer),
        Err(error) => rpc::answer_error(conn, &error),
    }
    Ok(Step::Again)
}
