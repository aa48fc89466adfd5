//! scratch
use std::time::{Duration, Instant};
#[tokio::main(flavor = "current_thread")]
async fn main() {
    let a: Vec<String> = std::env::args().collect();
    let locks = fencelock::connect("file:/tmp/p/locks").await.unwrap();
    if a[1] == "pairs" {
        let m = locks.mutex("x");
        for round in 0..3 {
            let n = 50_000;
            let t = Instant::now();
            for _ in 0..n { m.acquire().await.unwrap().release().await.unwrap(); }
            println!("round {round}: {:.2} us per pair", t.elapsed().as_secs_f64() * 1e6 / n as f64);
        }
        let n = 10_000;
        let t = Instant::now();
        for i in 0..n { locks.mutex(format!("n{i}")).acquire().await.unwrap().release().await.unwrap(); }
        println!("distinct: {:.2} us per pair", t.elapsed().as_secs_f64() * 1e6 / n as f64);
        let t = Instant::now();
        let mut v = vec![];
        for i in 0..n { v.push(locks.mutex(format!("n{i}")).acquire().await.unwrap()); }
        println!("10k held: {:?}", t.elapsed());
        let t = Instant::now();
        for g in v { g.release().await.unwrap(); }
        println!("10k released: {:?}", t.elapsed());
        let t = std::fs::read("/tmp/p/x").ok(); let _ = t;
        let f = "/tmp/p/rawfile"; std::fs::write(f, "").unwrap();
        let t = Instant::now();
        for _ in 0..100000 { let f = std::fs::File::open(f).unwrap(); f.lock().unwrap(); }
        println!("raw {:.2} us", t.elapsed().as_secs_f64() * 10.0);
    } else if a[1] == "hand" {
        let m = locks.mutex("h").ttl(Duration::from_secs(5));
        let n: usize = a[2].parse().unwrap();
        let t = Instant::now();
        for _ in 0..n { m.acquire().await.unwrap().release().await.unwrap(); }
        println!("{:.2} us per", t.elapsed().as_secs_f64() * 1e6 / n as f64);
    } else if a[1] == "hold" {
        let g = locks.mutex(&a[2]).ttl(Duration::from_secs(2)).acquire().await.unwrap();
        println!("held {}", g.token());
        let why = g.lost().await;
        println!("lost {why}");
    }
    locks.close().await.unwrap();
}
