//! The server's capacity for starts: sandboxes with silent agents occupy part of it until they time out, but never all
//! of it.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;

use crate::server::{Server, until};

const SILENT: &str = "silent-when-resumed";
const BROKEN: &str = "broken-when-resumed";

/// Creates and pauses `count` sandboxes that resume on traffic.
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

/// Number of failed resumes in the server's log.
fn failed_resumes(server: &Server) -> usize {
    server.log().matches("the resume failed").count()
}

#[test]
fn anonymous_resumes_leave_capacity_for_creates() {
    let server = Server::with_log(&[SILENT], &["--warm", "0:0"], "info,pool=debug");
    // More than the capacity of the largest host that runs this test.
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
        until("resumes are in progress", || {
            server.log().matches("to=Resuming").count() > 0
        });
        // Each agent stays silent until the start times out. If a create had to wait for capacity, at least one resume
        // would have ended before it.
        for _ in 0..5 {
            let id = server.create("good", &json!({}));
            server.kill(&id);
        }
        assert_eq!(answered.load(Ordering::SeqCst), 0, "creates had to wait");
    });
    assert!(failed_resumes(&server) > 0, "{}", server.log());
}

#[test]
fn traffic_to_a_paused_sandbox_waits_for_room() {
    let options = ["--warm", "0:0", "--max-sandboxes", "1"];
    let server = Server::start(&[], &options);
    let ids = sleepers(&server, "good", 1);
    let other = server.create("good", &json!({}));
    std::thread::scope(|scope| {
        let knock = scope.spawn(|| server.knock(&ids[0], 49_983));
        until("the request waits", || {
            server.figure("cube_pool_wakes_waited_total") == 1
        });
        server.kill(&other);
        let answer = knock.join().unwrap();
        assert_eq!(answer.status, 204, "{}", answer.text());
    });
    server.pause(&ids[0], &json!({})).expect(204);
    server.create("good", &json!({}));
    let refused = server.knock(&ids[0], 49_983);
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert!(refused.text().contains("no room"), "{}", refused.text());
    assert_eq!(server.figure("cube_pool_wakes_waited_total"), 2);
}

#[test]
fn a_failed_resume_is_not_repeated_by_every_request() {
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
    // The first request starts a resume. The other requests get the error of this resume and do not start another.
    assert_eq!(failed_resumes(&server), 1);
    // A connect request always tries to resume. Requests to the sandbox do so only after a delay, which grows with each
    // failure.
    let connect = format!("/v2/sandboxes/{}/connect", ids[0]);
    server.post(&connect, &json!({"timeout": 60})).expect(500);
    assert_eq!(failed_resumes(&server), 2);
    assert_eq!(server.knock(&ids[0], 8080).status, 503);
    assert_eq!(failed_resumes(&server), 2);
}

#[test]
fn a_warm_slot_whose_agent_sends_unrequested_data_is_not_leased() {
    let server = Server::start(&["chatty-when-warm"], &["--warm", "1:1"]);
    until("it has spoken", || {
        // One warm slot of each of the two templates.
        server.figure("cube_pool_warm") == 2 && server.said().contains("said")
    });
    let answer = server.try_create("chatty-when-warm", &json!({}));
    assert!(answer.status >= 500, "{}", answer.status);
}
