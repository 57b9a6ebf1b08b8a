"""An image classifier in Lightning, with a data module, metrics by hand and a schedule."""

import lightning as L
import torch
import torch.nn.functional as F
import torchvision
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, random_split
from torchvision import transforms


class ImagesDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 256, num_workers: int = 2):
        super().__init__()
        self.save_hyperparameters()
        self.transform = transforms.Compose(
            [transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize((0.5,), (0.25,))]
        )

    def setup(self, stage=None):
        data = torchvision.datasets.FakeData(4096, (3, 32, 32), 10, transform=self.transform)
        self.train_set, self.val_set = random_split(data, [0.9, 0.1])

    def train_dataloader(self):
        return DataLoader(
            self.train_set, self.hparams.batch_size, shuffle=True, num_workers=self.hparams.num_workers
        )

    def val_dataloader(self):
        return DataLoader(self.val_set, self.hparams.batch_size, num_workers=self.hparams.num_workers)


def create_model(num_classes):
    model = torchvision.models.resnet18(weights=None, num_classes=num_classes)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


class LitClassifier(L.LightningModule):
    def __init__(self, num_classes: int = 10, lr: float = 0.05, batch_size: int = 256):
        super().__init__()
        self.save_hyperparameters()
        self.model = create_model(num_classes)

    def forward(self, x):
        return F.log_softmax(self.model(x), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.nll_loss(logits, y)
        accuracy = (logits.argmax(dim=1) == y).float().mean()
        self.log("train_loss", loss)
        self.log("train_acc", accuracy, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.nll_loss(logits, y), prog_bar=True)
        self.log("val_acc", (logits.argmax(dim=1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    L.seed_everything(7)
    trainer = L.Trainer(
        max_epochs=10,
        accelerator="auto",
        devices=1,
        gradient_clip_val=1.0,
        callbacks=[LearningRateMonitor("step"), ModelCheckpoint(monitor="val_acc", mode="max")],
    )
    trainer.fit(LitClassifier(), datamodule=ImagesDataModule())


if __name__ == "__main__":
    main()
