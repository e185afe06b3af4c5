//! Places for starts: agents that say nothing hold one each until their time is over, but never all.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;

use crate::server::{Server, until};

const SILENT: &str = "silent-when-resumed";
const BROKEN: &str = "broken-when-resumed";

/// Paused sandboxes that traffic wakes.
fn sleepers(server: &Server, conduct: &str, count: usize) -> Vec<String> {
    let options = json!({"autoPause": true, "autoResume": {"enabled": true}});
    let ids: Vec<_> = (0..count)
        .map(|_| server.create(conduct, &options))
        .collect();
    for id in &ids {
        server.pause(id, &json!({})).expect(204);
    }
    ids
}

/// How many resumes have failed, as the server's log has it.
fn failed_resumes(server: &Server) -> usize {
    server.log().matches("the resume failed").count()
}

#[test]
fn anonymous_resumes_leave_places_for_creates() {
    let server = Server::with_log(&[SILENT], &["--warm", "0:0"], "info,pool=debug");
    // More than there are places on the largest host that this runs on.
    let cores = std::thread::available_parallelism().unwrap().get();
    let ids = sleepers(&server, SILENT, 2 * cores + 2);
    let answered = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for id in &ids {
            scope.spawn(|| {
                let answer = server.knock(id, 8080);
                answered.fetch_add(1, Ordering::SeqCst);
                assert!(matches!(answer.status, 429 | 503), "{}", answer.status);
            });
        }
        until("resumes are under way", || {
            server.log().matches("to=Resuming").count() > 0
        });
        // Each of them is silent for as long as a start may take: whoever had to wait for one would see it answered.
        for _ in 0..5 {
            let id = server.create("good", &json!({}));
            server.kill(&id);
        }
        assert_eq!(answered.load(Ordering::SeqCst), 0, "creates had to wait");
    });
    assert!(failed_resumes(&server) > 0, "{}", server.log());
}

#[test]
fn a_resume_that_fails_is_not_tried_at_every_request() {
    const KNOCKS: usize = 60;
    let server = Server::start(&[BROKEN], &["--warm", "0:0"]);
    let ids = sleepers(&server, BROKEN, 1);
    std::thread::scope(|scope| {
        for _ in 0..KNOCKS {
            scope.spawn(|| {
                let answer = server.knock(&ids[0], 8080);
                assert_eq!(answer.status, 503, "{}", answer.text());
                assert!(answer.header("retry-after").is_some());
            });
        }
    });
    // The first begins a resume; the others hear of its failure, and begin no other.
    assert_eq!(failed_resumes(&server), 1);
    // Whoever has a key may try, and a resume by traffic waits longer each time.
    let connect = format!("/v2/sandboxes/{}/connect", ids[0]);
    server.post(&connect, &json!({"timeout": 60})).expect(500);
    assert_eq!(failed_resumes(&server), 2);
    assert_eq!(server.knock(&ids[0], 8080).status, 503);
    assert_eq!(failed_resumes(&server), 2);
}

#[test]
fn an_agent_that_speaks_in_a_warm_slot_gets_no_lease() {
    let server = Server::start(&["chatty-when-warm"], &["--warm", "1:1"]);
    until("it has spoken", || {
        // One of `good`, too.
        server.figure("cube_pool_warm") == 2 && server.said().contains("said")
    });
    let answer = server.try_create("chatty-when-warm", &json!({}));
    assert!(answer.status >= 500, "{}", answer.status);
}
