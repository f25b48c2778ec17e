//! A trie that finds the entries with which a text begins.

/// Byte strings and their values, as a trie. The children of a node are adjacent.
#[derive(Debug)]
pub(super) struct ByteTrie {
    nodes: Vec<Node>,
    /// The bytes that lead to the children of each node, in order, with the index of each child.
    edges: Vec<(u8, u32)>,
}

#[derive(Debug, Clone, Copy)]
struct Node {
    first_edge: u32,
    num_edges: u16,
    value: Option<u32>,
}

impl ByteTrie {
    pub(super) fn new(mut entries: Vec<(&[u8], u32)>) -> Self {
        entries.sort_unstable();
        let empty = Node { first_edge: 0, num_edges: 0, value: None };
        let mut trie = Self { nodes: vec![empty], edges: Vec::new() };
        // Each open node comes with its entries, which share their first `depth` bytes.
        let mut open = vec![(0, entries.as_slice(), 0)];
        while let Some((node, entries, depth)) = open.pop() {
            let own = entries.iter().take_while(|(bytes, _)| bytes.len() == depth).count();
            trie.nodes[node].value = entries[..own].first().map(|(_, value)| *value);
            trie.nodes[node].first_edge = trie.edges.len() as u32;
            for group in entries[own..].chunk_by(|a, b| a.0[depth] == b.0[depth]) {
                let child = trie.nodes.len();
                trie.nodes.push(empty);
                trie.nodes[node].num_edges += 1;
                trie.edges.push((group[0].0[depth], child as u32));
                open.push((child, group, depth + 1));
            }
        }
        trie
    }

    /// Calls `visit` with the length and the value of each entry that is a prefix of `input`, the shortest first.
    pub(super) fn prefixes(&self, input: &[u8], mut visit: impl FnMut(usize, u32)) {
        let mut node = self.nodes[0];
        for (index, byte) in input.iter().enumerate() {
            let first = node.first_edge as usize;
            let edges = &self.edges[first..first + usize::from(node.num_edges)];
            let Ok(edge) = edges.binary_search_by_key(byte, |(byte, _)| *byte) else { return };
            node = self.nodes[edges[edge].1 as usize];
            if let Some(value) = node.value {
                visit(index + 1, value);
            }
        }
    }

    /// The length and the value of the longest entry that is a prefix of `input`.
    pub(super) fn longest_prefix(&self, input: &[u8]) -> Option<(usize, u32)> {
        let mut longest = None;
        self.prefixes(input, |length, value| longest = Some((length, value)));
        longest
    }
}

/// The length of the first character of `input`, which is not empty.
pub(super) fn character_length(input: &[u8]) -> usize {
    let length = match input[0] {
        0xf0.. => 4,
        0xe0.. => 3,
        0xc0.. => 2,
        _ => 1,
    };
    length.min(input.len())
}
