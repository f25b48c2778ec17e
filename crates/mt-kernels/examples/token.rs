//! Measures the products of one generated token of several rows:
//! `cargo run --release -p mt-kernels --example token [rounds] [rows] [type]`, by default of one row in `bf16`.
//!
//! The weights, 100 MB of `bf16` or 200 MB of `f32`, are read from memory. For comparison, a loop only reads the same
//! memory, with the same number of synchronizations of two threads. The model is the one of `bench/peers.sh`.

mod memory;

use std::{
    hint::{black_box, spin_loop},
    ops::Range,
    sync::atomic::{AtomicPtr, AtomicUsize, Ordering},
    time::Instant,
};

use half::bf16;
use mt_kernels::{Arithmetic, Dim, Elements, ElementsMut, Operand, Product, Team, dots};

/// Products of one left operand, computed in one call: their number, and the columns and contraction of each.
#[derive(Clone, Copy)]
struct Call(usize, [usize; 2]);

const LAYERS: usize = 8;
const LAYER: [Call; 4] =
    [Call(3, [512, 512]), Call(1, [512, 512]), Call(2, [2048, 512]), Call(1, [512, 2048])];
const HEAD: Call = Call(1, [32000, 512]);

impl Call {
    fn num_weights(self) -> usize {
        let Self(count, [columns, depth]) = self;
        count * columns * depth
    }

    fn name(self) -> String {
        let Self(count, [columns, depth]) = self;
        format!("{count} of {depth} by {columns}")
    }
}

/// Numbers in one of the types of weights.
enum Values {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Values {
    fn new(dtype: &str, len: usize) -> Self {
        match dtype {
            "f32" => Self::F32(vec![0.01; len]),
            "bf16" => Self::Bf16(vec![bf16::from_f32(0.01); len]),
            _ => panic!("`{dtype}` is neither `f32` nor `bf16`"),
        }
    }

    fn elements(&self, range: Range<usize>) -> Elements<'_> {
        match self {
            Self::F32(values) => Elements::F32(&values[range]),
            Self::Bf16(values) => Elements::Bf16(&values[range]),
        }
    }

    fn size(&self) -> usize {
        match self {
            Self::F32(_) => size_of::<f32>(),
            Self::Bf16(_) => size_of::<bf16>(),
        }
    }

    fn arithmetic(&self) -> Arithmetic {
        match self {
            Self::F32(_) => Arithmetic::F32,
            Self::Bf16(_) => Arithmetic::Bf16,
        }
    }
}

/// Two threads, one of which polls for tasks and never sleeps. Tasks must not panic.
struct Pair {
    task: AtomicPtr<&'static (dyn Fn(usize) + Sync)>,
    count: AtomicUsize,
    next: AtomicUsize,
    done: AtomicUsize,
}

static PAIR: Pair = Pair {
    task: AtomicPtr::new(std::ptr::null_mut()),
    count: AtomicUsize::new(0),
    next: AtomicUsize::new(0),
    done: AtomicUsize::new(0),
};

impl Pair {
    fn work(&self, task: &(dyn Fn(usize) + Sync), count: usize) {
        while let index = self.next.fetch_add(1, Ordering::AcqRel)
            && index < count
        {
            task(index);
        }
    }

    fn help(&self) {
        loop {
            let task = self.task.load(Ordering::Acquire);
            if task.is_null() {
                spin_loop();
                continue;
            }
            // SAFETY: tasks do not panic, so the caller waits until this thread is done.
            let task = unsafe { *task };
            self.work(task, self.count.load(Ordering::Acquire));
            self.task.store(std::ptr::null_mut(), Ordering::Release);
            self.done.store(1, Ordering::Release);
        }
    }
}

impl Team for Pair {
    fn num_threads(&self) -> usize {
        2
    }

    fn for_each(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime changes, and this function waits for the other thread.
        let mut task: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(task) };
        self.next.store(0, Ordering::Release);
        self.done.store(0, Ordering::Release);
        self.count.store(count, Ordering::Release);
        self.task.store(&raw mut task, Ordering::Release);
        self.work(task, count);
        while self.done.load(Ordering::Acquire) == 0 {
            spin_loop();
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, default: usize| {
        arguments.get(index).map_or(default, |number| number.parse().expect("arguments are numbers"))
    };
    let (rounds, rows) = (number(0, 50), number(1, 1));
    let dtype = arguments.get(2).map_or("bf16", String::as_str);
    std::thread::spawn(|| PAIR.help());
    let calls: Vec<Call> = (0..LAYERS).flat_map(|_| LAYER).chain([HEAD]).collect();
    let weights = Values::new(dtype, calls.iter().map(|call| call.num_weights()).sum());
    let inputs = Values::new(dtype, rows * 2048);
    let mut sums = Values::new(dtype, rows * 32000);
    let mut times = [vec![], vec![]];
    let mut least = vec![[f64::INFINITY; 2]; calls.len()];
    for _ in 0..rounds {
        for (kind, times) in times.iter_mut().enumerate() {
            let (begin, mut start) = (Instant::now(), 0);
            for (call, least) in calls.iter().zip(&mut least) {
                let own = start..start + call.num_weights();
                start = own.end;
                let before = Instant::now();
                match kind {
                    0 => multiply(*call, rows, [&inputs, &weights], own, &mut sums),
                    _ => read(weights.elements(own)),
                }
                least[kind] = least[kind].min(before.elapsed().as_secs_f64());
            }
            times.push(begin.elapsed().as_secs_f64());
        }
    }
    println!("{:20} {:>18} {:>18}", "", "products", "reading");
    let show = |name: &str, num_weights: usize, seconds: [f64; 2]| {
        let bytes = (weights.size() * num_weights) as f64;
        let shown = seconds.map(|time| format!("{:.1} us {:4.1} GB/s", time * 1e6, 1e-9 * bytes / time));
        println!("{name:20} {:>18} {:>18}", shown[0], shown[1]);
    };
    let middle = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let num_weights = calls.iter().map(|call| call.num_weights()).sum();
    show("a token, median", num_weights, times.map(middle));
    let (layers, head) = least.split_at(calls.len() - 1);
    for (index, call) in LAYER.into_iter().enumerate() {
        let of = |kind: usize| {
            middle(layers.iter().skip(index).step_by(LAYER.len()).map(|times| times[kind]).collect())
        };
        show(&call.name(), call.num_weights(), [of(0), of(1)]);
    }
    show(&HEAD.name(), HEAD.num_weights(), head[0]);
}

fn multiply(
    Call(count, [columns, depth]): Call,
    rows: usize,
    [inputs, weights]: [&Values; 2],
    own: Range<usize>,
    sums: &mut Values,
) {
    let dim = |size, stride| vec![Dim { size, stride }];
    let elements = inputs.elements(0..rows * depth);
    let lhs = Operand { elements, batch: vec![], free: dim(rows, depth), contract: dim(depth, 1) };
    let sides: Vec<Operand> = own
        .step_by(columns * depth)
        .map(|start| Operand {
            elements: weights.elements(start..start + columns * depth),
            batch: vec![],
            free: dim(columns, 1),
            contract: dim(depth, columns),
        })
        .collect();
    let arithmetic = weights.arithmetic();
    let mut results: Vec<ElementsMut> = match sums {
        Values::F32(sums) => {
            sums.chunks_exact_mut(rows * columns).take(count).map(ElementsMut::F32).collect()
        }
        Values::Bf16(sums) => {
            sums.chunks_exact_mut(rows * columns).take(count).map(ElementsMut::Bf16).collect()
        }
    };
    let products =
        sides.iter().zip(results.drain(..)).map(|(rhs, result)| Product { lhs: &lhs, rhs, result });
    dots(&PAIR, arithmetic, products.collect());
}

/// Reads the given weights in four tasks.
fn read(weights: Elements) {
    // SAFETY: any bits are a valid integer.
    let words = unsafe {
        match weights {
            Elements::F32(values) => values.align_to::<u64>().1,
            Elements::Bf16(values) => values.align_to::<u64>().1,
            Elements::I8(values) => values.align_to::<u64>().1,
        }
    };
    PAIR.for_each(4, &|share| {
        let len = words.len() / 4;
        black_box(memory::read(&words[share * len..][..len]));
    });
}
