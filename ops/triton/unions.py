"""The union of the pages that a tile of neighbouring rows picked, and which of its rows picked each page.

A tile is ROWS_PER_TILE consecutive rows. Their history pages (all but each row's last, partly filled one, which the attention
kernels treat apart) go into a hash table in global memory, one a tile: the first row's, then those of the others together. In
every round each pending page looks at its slot, the free slots take the largest page that asks for them, and whoever does not
find itself moves on. Rounds are separated by barriers, so the table, and with it the order in which a tile is walked, depends
on nothing but the pages: same batch, same bits. A hash table costs some dozen rounds of memory latency, all tiles of a launch
together. Sorted pages would cost a sort of some 4,096 ids a tile, and a bitmap a size that grows with the cache instead of with
what the rows picked.

A tile is walked row by row instead where that is cheaper or the union would be wrong: its union is too large for the sharing to
pay, its rows belong to different requests, or a row lists a page twice (which must then weigh twice).
"""

import torch
import triton
import triton.language as tl

ROWS_PER_TILE = 8
# What a page of a union costs, over what a page of one row costs row by row, in sixteenths: from an H200, 2026-11-30.
UNION_COST = 30
# Pages of a row that are placed at a time, and warps. With many tiles small programs, whose latency the others hide; with few
# (up to FEW_TILES a multiprocessor) larger ones, which take fewer rounds. From an H200, 2026-11-30.
BUILD_MANY = (32, 4)
BUILD_FEW = (128, 8)
FEW_TILES = 3
_ROW_BY_ROW = tl.constexpr(-1)
# Lists end in copies of a listed page with no row's bit set, so that a step of up to 16 pages never runs past the end.
PADDING = 16


@triton.jit
def row_range(indptr, row, live, pages_size):
    """[begin, end) of a row's pages, whatever indptr holds."""
    begin = tl.load(indptr + row, mask=live, other=0).to(tl.int64)
    end = tl.load(indptr + row + 1, mask=live, other=0).to(tl.int64)
    begin = tl.minimum(tl.maximum(begin, 0), pages_size)
    end = tl.minimum(end, pages_size)
    return begin, tl.maximum(end, begin)


@triton.jit
def _place_pages(slot_pages, slot_bits, page, pending, bit, page_limit, SLOTS: tl.constexpr):
    """Puts the pending lanes' pages into the table and sets their rows' bits; how many found no slot in a reasonable time."""
    wanted = tl.load(page, mask=pending, other=0)
    wanted = tl.minimum(tl.maximum(wanted, 0), page_limit - 1)
    mixed = wanted.to(tl.uint32) * 0x9E3779B1
    slot = ((mixed >> 15) & (SLOTS - 1)).to(tl.int32)
    step = ((mixed >> 7) & (SLOTS - 1)).to(tl.int32) | 1
    unplaced = tl.sum(pending.to(tl.int32), 0)
    rounds = 0
    while (unplaced > 0) & (rounds < 24):
        seen = tl.load(slot_pages + slot * 2, mask=pending, other=-2, volatile=True)
        tl.debug_barrier()
        free = pending & (seen == -1)
        tl.atomic_max(slot_pages + slot * 2, wanted, mask=free, sem="relaxed")
        tl.debug_barrier()
        seen = tl.where(free, tl.load(slot_pages + slot * 2, mask=free, other=-2, volatile=True), seen)
        tl.atomic_or(slot_bits + slot * 2, bit, mask=pending & (seen == wanted), sem="relaxed")
        pending = pending & (seen != wanted)
        slot = tl.where(pending, (slot + step) & (SLOTS - 1), slot)
        unplaced = tl.sum(pending.to(tl.int32), 0)
        rounds += 1
    return unplaced


@triton.jit(do_not_specialize=["rows", "pages_size", "page_limit"])
def _build_unions_kernel(
    pages,
    indptr,
    owners,
    table,
    lists,
    bits,
    counts,
    rows,
    pages_size,
    page_limit,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    COST: tl.constexpr,
    PAD: tl.constexpr,
):
    """table int64 [tiles, SLOTS]: a page in a slot's low half, -1 if free, and its rows' bits in the high half."""
    tile = tl.program_id(0)
    table += tile.to(tl.int64) * SLOTS
    slot_pages = table.to(tl.pointer_type(tl.int32))
    slot_bits = slot_pages + 1
    lists += tile.to(tl.int64) * (ROWS + SLOTS + PAD)
    bits += tile.to(tl.int64) * (ROWS + SLOTS + PAD)

    own_row = tl.arange(0, ROWS)
    tile_row = tile.to(tl.int64) * ROWS + own_row
    in_range = tile_row < rows
    begin, end = row_range(indptr, tile_row, in_range, pages_size)
    history = tl.maximum(end - begin - 1, 0)
    total = tl.sum(history, 0)
    owner = tl.load(owners + tile_row, mask=in_range, other=0)
    live = end > begin
    first_owner = tl.min(tl.where(live, owner, 2147483647), 0)
    last_owner = tl.max(tl.where(live, owner, -2147483648), 0)
    # The most pages for which the sharing pays.
    most = total * 16 // COST
    # A tile of dead rows only is left to the row kernel, which writes its zeros; a single history needs no sharing to be a union.
    widest = tl.max(history, 0).to(tl.int32)
    fits = (first_owner == last_owner) & (widest <= SLOTS * 7 // 8)
    if fits:
        slots = tl.arange(0, CHUNK)
        for first in range(0, SLOTS, CHUNK):
            tl.store(table + first + slots, tl.full([CHUNK], 0xFFFFFFFF, tl.int64))
        tl.debug_barrier()

    unplaced = tl.full((), 0, tl.int32)
    if fits:
        # The first row alone: most pages of a tile are new only once, and do not compete for slots after that.
        lane = tl.arange(0, ROWS * WIDTH)
        row_begin, row_end = row_range(indptr, tile.to(tl.int64) * ROWS, tile.to(tl.int64) * ROWS < rows, pages_size)
        for first in range(0, (row_end - row_begin).to(tl.int32) - 1, ROWS * WIDTH):
            place = row_begin + first + lane
            pending = (place < row_end - 1) & (unplaced == 0)
            unplaced += _place_pages(slot_pages, slot_bits, pages + place, pending, lane * 0 + 1, page_limit, SLOTS)
        # The others together, WIDTH pages of each at a time.
        lane_row = lane // WIDTH
        row = tile.to(tl.int64) * ROWS + lane_row
        lane_begin, lane_end = row_range(indptr, row, (row < rows) & (lane_row > 0), pages_size)
        for first in range(0, widest, WIDTH):
            place = lane_begin + first + lane % WIDTH
            # Once the table was too full, what is left is not worth placing.
            pending = (place < lane_end - 1) & (unplaced == 0)
            unplaced += _place_pages(slot_pages, slot_bits, pages + place, pending, 1 << lane_row, page_limit, SLOTS)
        tl.debug_barrier()

    count = tl.full((), _ROW_BY_ROW, tl.int32)
    if fits & (unplaced == 0):
        found = tl.full((), 0, tl.int32)
        listed = tl.full((), 0, tl.int64)
        some_page = tl.full((), 0, tl.int32)
        slots = tl.arange(0, CHUNK)
        for first in range(0, SLOTS, CHUNK):
            entry = tl.load(table + first + slots, volatile=True)
            page = entry.to(tl.int32)
            picked = (entry >> 32).to(tl.int32)
            used = page >= 0
            target = ROWS + found + tl.cumsum(used.to(tl.int32), 0) - 1
            tl.store(lists + target, page, mask=used)
            tl.store(bits + target, picked.to(tl.uint8), mask=used)
            found += tl.sum(used.to(tl.int32), 0)
            some_page = tl.maximum(some_page, tl.max(page, 0))
            # Bits of a byte, counted in pairs, fours and all.
            picked = picked - ((picked >> 1) & 0x55)
            picked = (picked & 0x33) + ((picked >> 2) & 0x33)
            listed += tl.sum(((picked + (picked >> 4)) & 0xF).to(tl.int64), 0)
        pad = ROWS + found + tl.arange(0, PAD)
        tl.store(lists + pad, some_page + tl.zeros([PAD], tl.int32))
        tl.store(bits + pad, tl.zeros([PAD], tl.uint8))
        # The lists begin with every row's own last page; a dead row repeats a live row's and is seen by nobody.
        own = tl.load(pages + end - 1, mask=live, other=-1)
        own = tl.where(live, tl.minimum(tl.maximum(own, 0), page_limit - 1), -1)
        tl.store(lists + own_row, tl.where(live, own, tl.max(own, 0)))
        tl.store(bits + own_row, tl.where(live, 1 << own_row, 0).to(tl.uint8))
        # Fewer bits than listed pages: some row lists a page twice.
        if (listed == total) & ((found <= most) | (total == 0)):
            count = found
    tl.store(counts + tile, count)


def union_slots(rows, pages_size):
    """Slots of a tile's table: enough for a union of three times a row's pages, by the mean the buffers allow for."""
    mean = max(pages_size // max(rows, 1), 1)
    return min(triton.next_power_of_2(max(3 * mean, 256)), 8192)


def build_unions(pages, indptr, owners, rows, page_limit, multiprocessors=1):
    """Lists of every tile's pages and row bits.

    Returns (lists int32 [tiles, 8 + slots + 16], bits uint8 of the same shape, counts int32 [tiles]). A tile's list is its rows'
    own last pages, one a row, then counts[tile] pages of the union, then padding; bit i of a page's byte is set if row i of the
    tile picked it. A count of -1 means that the tile is to be walked row by row.
    """
    tiles = -(-rows // ROWS_PER_TILE)
    width, warps = BUILD_FEW if tiles <= FEW_TILES * multiprocessors else BUILD_MANY
    slots = union_slots(rows, pages.shape[0])
    length = ROWS_PER_TILE + slots + PADDING
    # One allocation: tables, bits, lists, counts. An even number of tiles keeps each part on 16 bytes: kernels specialize on it.
    even = tiles + tiles % 2
    scratch = torch.empty(even * (slots + length // 8) + even * (length + 1) // 2, dtype=torch.int64, device=pages.device)
    bits = scratch.view(torch.uint8)[8 * even * slots :].as_strided((tiles, length), (length, 1))
    rest = scratch.view(torch.int32)[2 * even * (slots + length // 8) :]
    lists, counts = rest.as_strided((tiles, length), (length, 1)), rest[even * length : even * length + tiles]
    _build_unions_kernel[(tiles,)](
        pages,
        indptr,
        owners,
        scratch,
        lists,
        bits,
        counts,
        rows,
        pages.shape[0],
        page_limit,
        SLOTS=slots,
        ROWS=ROWS_PER_TILE,
        WIDTH=width,
        CHUNK=256,
        COST=UNION_COST,
        PAD=PADDING,
        num_warps=warps,
    )
    return lists, bits, counts
